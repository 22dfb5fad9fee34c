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
    """What is learned. sft: the answers. dpo, orpo, simpo: chosen before rejected ones; kto: good before bad ones.
    reward: to score answers; classify: to label texts, or rank documents; embed: to bring texts near their partners;
    distill: a teacher's probabilities (docs/methods.md). All but sft are trained by TRL or transformers, on one GPU."""
    beta: float | None = setting(None, above=0)
    """Methods dpo, kto, orpo and simpo: how much a preference weighs. Default: TRL's 0.1; simpo 2."""
    teacher: str | None = None
    """Method distill: the model to learn from, of any size; a folder, GGUF file or hub id with the same tokens, or
    FILE.parquet of what it said (outcore score --top_k)."""
