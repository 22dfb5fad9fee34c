"""What is evaluated: an opened model, who it is, and how it is laid out on this machine."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from outcore import __version__
from outcore.evaluate.asking import PORTION_TOKENS, EngineAnswerer
from outcore.evaluate.tasks import harness_version
from outcore.infer.opening import OpenedModel, model_hash


@dataclass(frozen=True)
class Subject:
    """An opened model and what the history notes of it."""

    opened: OpenedModel
    name: str
    model_hash: str
    placement: tuple[str, ...]
    launch: dict[str, Any]
    versions: dict[str, str]
    answerer: EngineAnswerer
    portion_tokens: int
    """Tokens that are asked at once, unless told: a pass's worth; on a server less, so that others get their turn."""

    @property
    def answers_depend_on(self) -> dict[str, Any]:
        """What a journal's answers are valid for."""
        keys = ("device", "precision", "adapter", "chunk_tokens", "context_tokens", "kv_format")
        return {"model": self.name, "model_hash": self.model_hash} | {key: self.launch[key] for key in keys}


SERVED_TOKENS = {"cuda": 1 << 14, "cpu": 1 << 11}


def subject_of(opened: OpenedModel, name: str, is_well: Callable[[], bool] | None = None) -> Subject:
    """A model that was opened here, or (with `is_well`) that a server runs."""
    found = opened.found
    kind = opened.device.type
    tokens = PORTION_TOKENS if is_well is None else SERVED_TOKENS
    return Subject(
        opened,
        name,
        model_hash(found.folders),
        tuple(opened.placement.lines()),
        launch_of(opened),
        {
            "outcore": __version__,
            "lm_eval": harness_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        EngineAnswerer(opened, is_well),
        tokens[kind],
    )


def launch_of(opened: OpenedModel) -> dict[str, Any]:
    """How the model is laid out: ranks, ZeRO's terms for where weights live, and everything the answers depend on."""
    placement = opened.placement
    homes = {home.home for home in placement.parts}
    weights = "nvme" if "nvme" in homes else "cpu" if "ram" in homes and opened.device.type != "cpu" else "none"
    dtype = next(p.dtype for p in opened.found.loaded.model.parameters() if p.is_floating_point())
    return {
        "world_size": 1,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "zero": {
            "stage": 0 if weights == "none" else 3,
            "offload_param": weights,
            "num_buffers": placement.num_buffers,
        },
        "device": str(opened.device),
        "device_name": torch.cuda.get_device_name(opened.device) if opened.device.type == "cuda" else "",
        "precision": str(dtype).removeprefix("torch."),
        "preset": placement.preset.name,
        "kv_home": placement.kv_home,
        "kv_bytes": placement.kv_bytes,
        "kv_format": opened.engine.scheduler.cache.settings.kv_format,
        "context_tokens": placement.context_tokens,
        "chunk_tokens": placement.chunk_tokens,
        "pass_tokens": placement.pass_tokens,
        "max_sequences": placement.max_sequences,
        "adapter": ", ".join(opened.found.folders[1:]),
    }
