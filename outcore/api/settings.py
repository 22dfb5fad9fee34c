"""Settings of a model that answers, from what a caller says in our names or vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from outcore.common.words import did_you_mean
from outcore.infer.opening import InferSettings

OURS: Mapping[str, str] = MappingProxyType(
    {
        "aim": "preset",
        "dtype": "precision",
        "max_model_len": "context",
        "max_num_batched_tokens": "pass_tokens",
        "max_num_seqs": "max_sequences",
        "nvme_offload_path": "nvme_path",
        "quantization": "quantize",
    }
)
"""Names of vLLM, and of our commands, that mean the same -> the field."""
PRECISIONS: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
)
"""Names of torch's types -> ours."""


def infer_settings(config: InferSettings | None, said: Mapping[str, Any]) -> InferSettings:
    """`config` with what else was said. ValueError for an unknown name, or a value that cannot be."""
    check_known(said, known_names())
    found: dict[str, Any] = {}
    for name, value in said.items():
        ours = OURS.get(name, name)
        if ours in found:
            raise ValueError(f"{name} means {ours}, which is given as well: leave out one.")
        if ours == "precision":
            value = str(value).removeprefix("torch.")
            value = PRECISIONS.get(value, value)
        found[ours] = value
    return replace(config or InferSettings(), **found)


def known_names() -> set[str]:
    """Names of settings of a model that answers."""
    return {field.name for field in fields(InferSettings)} - {"adapters"} | OURS.keys()


def check_known(said: Iterable[str], known: Iterable[str]) -> None:
    """ValueError for a name that is not known, with the nearest that is."""
    if unknown := next((name for name in said if name not in known), None):
        raise ValueError(f"unknown setting {unknown!r}.{did_you_mean(unknown, known)}")
