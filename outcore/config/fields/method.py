"""Method: fields of the settings; each docstring is the text of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.config.spec import setting

Method = Literal["sft", "dpo", "orpo", "kto", "simpo", "reward", "classify", "embed", "distill"]


@dataclass(frozen=True)
class MethodFields:
    """Method."""

    method: Method = setting("sft", common=True)
    """Objective. sft: the answers. dpo, orpo, simpo: chosen before rejected ones; kto: good before bad ones.
    reward: to score answers; classify: to label texts, or rank documents; embed: to bring texts near their partners;
    distill: a teacher's probabilities (docs/methods.md). All but sft are trained by TRL or transformers, on one GPU."""
    pooling: Literal["mean", "last"] | None = None
    """Method embed: a text's vector is the mean of its tokens' last hidden states, or that of its last token. Default:
    what the model says (1_Pooling/config.json), else mean."""
    matryoshka: int | None = setting(None, above=0)
    """Method embed: vectors that are cut to as many numbers, to twice, four times ... as many, are trained, too."""
    beta: float | None = setting(None, above=0)
    """Methods dpo, kto, orpo and simpo: how much a preference weighs. Default: TRL's 0.1; simpo 2."""
    teacher: str | None = None
    """Method distill: the model to learn from, of any size; a folder, GGUF file or hub id with the same tokens,
    FILE.parquet of what it said (outcore score --top_k), or the address of a server that tells prompt_logprobs
    (http://...)."""
