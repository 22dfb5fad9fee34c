"""Method: fields of the settings; each docstring is the text of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.config.spec import setting

Method = Literal[
    "sft", "dpo", "orpo", "kto", "simpo", "reward", "classify", "embed", "distill", "grpo", "gspo", "rloo",
    "on_policy_distill",
]  # fmt: skip
ROLLED = ("grpo", "gspo", "rloo", "on_policy_distill")
"""Methods whose model answers while it is trained."""


def is_address(teacher: str | None) -> bool:
    """Whether the teacher is a server's address."""
    return teacher is not None and teacher.startswith(("http://", "https://"))


@dataclass(frozen=True)
class MethodFields:
    """Method."""

    method: Method = setting("sft", common=True)
    """Objective. sft: the answers. dpo, orpo, simpo: chosen before rejected ones; kto: good before bad ones.
    reward: to score answers; classify: to label texts, or rank documents; embed: to bring texts near their partners;
    distill: a teacher's probabilities; grpo, gspo, rloo: its own answers, by their rewards; on_policy_distill: its own
    answers, by a teacher's probabilities (docs/methods.md). All but sft are trained by TRL or transformers, on one
    GPU."""
    pooling: Literal["mean", "last"] | None = None
    """Method embed: a text's vector is the mean of its tokens' last hidden states, or that of its last token. Default:
    what the model says (1_Pooling/config.json), else mean."""
    matryoshka: int | None = setting(None, above=0)
    """Method embed: vectors that are cut to as many numbers, to twice, four times ... as many, are trained, too."""
    beta: float | None = setting(None, above=0)
    """Methods dpo, kto, orpo and simpo: how much a preference weighs. Default: TRL's 0.1; simpo 2. Methods grpo,
    gspo and rloo, with adapters: how much it costs to leave the model as it was (a KL divergence). Default: nothing."""
    teacher: str | None = None
    """Methods distill and on_policy_distill: the model to learn from, of any size; a folder, GGUF file or hub id with
    the same tokens, or the address of a server that tells prompt_logprobs (http://...). Method distill: also
    FILE.parquet of what it said (outcore score --top_k)."""
    reward_function: str | None = None
    """Methods grpo, gspo, rloo: FILE.py:NAME, a function of (prompts, completions, **columns of the rows) that returns
    a number for each answer; or math_verify (rows have an `answer`), or code (rows have `tests` for an answer's Python,
    which runs in a sandbox; code_without_sandbox: with limits alone). Your function runs without a sandbox. Data of
    reasoning-gym bring their own."""
    num_generations: int | None = setting(None, least=2)
    """Methods grpo, gspo, rloo, on_policy_distill: answers to each prompt; --batch_size counts answers. Default: 8."""
    max_completion_length: int | None = setting(None, above=0)
    """Methods grpo, gspo, rloo, on_policy_distill: tokens of an answer at most, beside its prompt within seq_length.
    Default: 256."""
    on_bad_reward: Literal["stop", "skip"] | None = None
    """Methods grpo, gspo, rloo: where a reward function fails, hangs, or returns what is no reward, the run stops
    (its steps are saved), or the prompt is left out of its step. Default: stop."""
    reward_timeout_s: float | None = setting(None, above=0)
    """Methods grpo, gspo, rloo: seconds to judge the answers to one prompt, then it counts as hanging. Default: 60."""
