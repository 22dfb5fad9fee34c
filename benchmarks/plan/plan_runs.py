"""The runs of plan_vs_measured.py: shapes from 0.1 to 3 B parameters, and what varies between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

SHAPES: Mapping[str, tuple[int, int, int, int, int, bool]] = MappingProxyType(
    {
        "0.1b": (768, 12, 12, 12, 3072, False),
        "0.4b": (1024, 24, 16, 4, 4096, False),
        "1.2b": (2048, 24, 16, 4, 5632, False),
        "1.3b-tied": (2048, 24, 32, 8, 6144, True),
        "2.9b": (2560, 32, 20, 4, 9216, False),
    }
)
"""Name -> hidden size, layers, heads, key-value heads, feed-forward width, tied embeddings; vocabulary 32,000 (tied:
128,256)."""


_TINY = MappingProxyType(
    {
        "hidden_size": 64,
        "n_embd": 64,
        "num_hidden_layers": 2,
        "n_layer": 2,
        "num_attention_heads": 4,
        "n_head": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 160,
        "moe_intermediate_size": 32,
        "vocab_size": 1024,
    }
)

_WHOLE: dict[str, Mapping[str, Any]] = {
    "gemma2-2.6b": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "vocab_size": 256000,
    },
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 6912,
        "sliding_window": 512,
        "vocab_size": 262144,
    },
    "gpt2-0.4b-dropout": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257},
    "moe-0.6b": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "moe_intermediate_size": 768,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
    "llama-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
}
_SHORT = {"gemma2-8-layers": "gemma2-2.6b", "llama-8-layers": "llama-8b"}
OTHERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {**_WHOLE, **{name: {**_WHOLE[whole], "num_hidden_layers": 8} for name, whole in _SHORT.items()}}
)
"""What forecasts were wrong for on a card that no constant was fitted on (issue 36): soft-capped or sliding attention
with a large tied vocabulary, dropout, experts, adapters on a large frozen base. With 8 layers the same layers take a
minute in all."""


def config_of(shape: str, *, tiny: bool = False) -> dict[str, Any]:
    """The Hugging Face configuration of a shape, or of a tiny one of the same kind."""
    if shape in OTHERS:
        return {**OTHERS[shape], **(_TINY if tiny else {})}
    hidden, layers, heads, kv_heads, ffn, tied = SHAPES[shape]
    if tiny:
        hidden, layers, heads, kv_heads, ffn = 64, 2, 4, 2, 160
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "vocab_size": 1024 if tiny else 128256 if tied else 32000,
    }


@dataclass(frozen=True)
class PlannedRun:
    """One run of train_model.py."""

    name: str
    shape: str
    seq_length: int
    micro_batch: int
    accumulation: int
    flags: tuple[str, ...]
    uses_nvme: bool = False

    def words(self) -> str:
        """For --list."""
        nvme = " --nvme_offload_path NVME" if self.uses_nvme else ""
        batch = f"{self.micro_batch} x {self.accumulation} rows of {self.seq_length}"
        return f"{self.shape}, {batch}: {' '.join(self.flags)}{nvme}"


def _stream(states: str, *more: str, clip: str = "1.0") -> tuple[str, ...]:
    return ("--engine", "stream", "--state_format", states, "--max_grad_norm", clip, *more)


def _deepspeed(stage: str, *more: str) -> tuple[str, ...]:
    return ("--engine", "deepspeed", "--zero_stage", stage, *more)


_ALL = (
    PlannedRun("s-0.1b-fp32", "0.1b", 1024, 8, 2, _stream("fp32")),
    PlannedRun("s-0.4b-split", "0.4b", 2048, 2, 4, _stream("split")),
    PlannedRun("s-1.2b-fp32", "1.2b", 1024, 4, 4, _stream("fp32")),
    PlannedRun("s-1.2b-split8-noclip", "1.2b", 1024, 4, 1, _stream("split8", clip="0")),
    PlannedRun("s-1.3b-tied-ram-act", "1.3b-tied", 4096, 1, 4, _stream("split", "--activations", "ram")),
    PlannedRun("s-2.9b-split8", "2.9b", 512, 4, 4, _stream("split8")),
    PlannedRun("s-1.2b-nvme-split8", "1.2b", 1024, 4, 2, _stream("split8", "--ram_budget_gib", "8.1"), True),
    PlannedRun("d-0.4b-ram", "0.4b", 1024, 4, 2, _deepspeed("zero3", "--offload_optimizer", "cpu")),
    PlannedRun("s-0.4b-long", "0.4b", 8192, 1, 2, _stream("fp32")),
    PlannedRun("s-0.4b-nvme-half", "0.4b", 1024, 4, 2, _stream("fp32", "--ram_budget_gib", "7.5"), True),
    PlannedRun("d-1.2b-ram", "1.2b", 1024, 4, 2, _deepspeed("zero3", "--offload_optimizer", "cpu")),
    PlannedRun("d-0.4b-nvme", "0.4b", 1024, 4, 1, _deepspeed("infinity", "--strict_offload"), True),
    PlannedRun("d-0.1b-none", "0.1b", 1024, 4, 2, _deepspeed("none")),
    PlannedRun(
        "d-2.9b-budget", "2.9b", 1024, 4, 1, _deepspeed("infinity", "--ram_budget_gib", "20", "--strict_offload"), True
    ),
    PlannedRun("s-0.4b-eager", "0.4b", 1024, 4, 2, _stream("fp32", "--compile", "off")),
    PlannedRun("s-gemma2", "gemma2-2.6b", 2048, 2, 4, _stream("split8")),
    PlannedRun("s-gemma3", "gemma3-1b", 2048, 2, 4, _stream("split")),
    PlannedRun("s-gpt2-dropout", "gpt2-0.4b-dropout", 1024, 4, 4, _stream("fp32")),
    PlannedRun("s-moe", "moe-0.6b", 1024, 4, 4, _stream("split")),
    PlannedRun("s-gemma2-short", "gemma2-8-layers", 2048, 2, 4, _stream("split8")),
    PlannedRun("s-lora-short", "llama-8-layers", 2048, 2, 4, _stream("fp32", "--lora_r", "16")),
    PlannedRun(
        "s-lora-short-pageable",
        "llama-8-layers",
        2048,
        2,
        4,
        _stream("fp32", "--lora_r", "16", "--staging_gib", "1"),
    ),
    PlannedRun("s-lora-8b", "llama-8b", 2048, 2, 4, _stream("fp32", "--lora_r", "16")),
    PlannedRun("s-1.2b-muon", "1.2b", 1024, 4, 4, _stream("fp32", "--optimizer", "muon")),
    PlannedRun("s-1.2b-muon-split-noclip", "1.2b", 1024, 4, 4, _stream("split", "--optimizer", "muon", clip="0")),
)
RUNS: Mapping[str, PlannedRun] = MappingProxyType({run.name: run for run in _ALL})
DEFAULT = tuple(run.name for run in _ALL[:10])
"""Ten of them within six minutes or so; --only all runs every one."""
