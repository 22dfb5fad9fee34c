"""The rule of engine auto, once: the planner forecasts by it and the training run follows it.

The ranks of one host, a decoder-only model and zero_stage infinity, 3 or unset: the streaming engine. An explicit stage
none, 1 or 2, several hosts, or a model that cannot be streamed: DeepSpeed."""

from __future__ import annotations

BELOW_ZERO3 = ("none", "zero1", "zero2")
"""Stages that keep parameters on the GPU; the streaming engine is ZeRO-3 and Infinity."""


def why_not_stream(
    num_processes: int,
    zero_stage: str | None,
    *,
    is_encoder_decoder: bool = False,
    processes_per_host: int | None = None,
) -> str:
    """Reason why not; '' when the streaming engine may train this run, otherwise the reason; the model itself is
    tried elsewhere."""
    if is_encoder_decoder:
        return "it streams decoder-only models, and this is an encoder-decoder"
    if num_processes > (processes_per_host or num_processes):
        return f"its ranks share one host's RAM, and {num_processes} ranks on several hosts were started"
    if zero_stage in BELOW_ZERO3:
        return f"zero_stage {zero_stage} was asked for"
    return ""


def why_not_muon(
    *, engine: str = "stream", ranks: int = 1, is_frozen: bool = False, state_format: str = "", tiled: bool = False
) -> str:
    """Why Muon cannot train such a run, with what to do, in words; '' where it can. `is_frozen`: whether any parameter
    is not trained; `tiled`: whether parts are computed in tiles."""
    why = {
        "is the streaming engine's: leave --engine deepspeed out": engine == "deepspeed",
        "updates matrices in RAM of one rank; train on one": ranks > 1,
        "trains whole matrices, and some are frozen here: leave --lora_r out": is_frozen,
        "keeps its momentum in fp32: use --state_format auto, fp32 or split": "8" in state_format,
        "takes a layer's gradient whole, and memory for layers in one piece is short; lower the micro-batch": tiled,
    }
    found = (words for words, applies in why.items() if applies)
    return next((f"optimizer muon {words}, or leave --optimizer muon out." for words in found), "")
