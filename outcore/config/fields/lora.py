"""LoRA: fields of the settings; each docstring is the text of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.config.spec import setting


@dataclass(frozen=True)
class LoraFields:
    """LoRA."""

    lora_r: int = setting(0, least=0, common=True)
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: int | None = setting(None, above=0)
    """LoRA scale. Default: 2 x lora_r."""
    lora_dropout: float = setting(0.0, least=0, below=1)
    """Dropout on the adapters' input."""
    lora_target_modules: str = "auto"
    """Comma-separated module names; auto: every linear layer but the head."""
    quantize: Literal["none", "nf4", "int8"] = setting("none", common=True)
    """Keep the frozen base in 4 (nf4) or 8 bits (int8), in RAM, on NVMe and on the way to the GPU. QLoRA."""
    lora_export: Literal["merged", "adapter"] = "merged"
    """Export the merged model, or the adapter alone."""
