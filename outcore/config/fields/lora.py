"""LoRA: fields of the settings; each docstring is the text of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.config.spec import setting


@dataclass(frozen=True)
class LoraFields:
    """LoRA."""

    lora_r: int = setting(0, least=0, common=True, aliases=("lora_rank", "peft_r"))
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: int | None = setting(None, above=0)
    """LoRA scale. Default: 2 x lora_r."""
    lora_dropout: float = setting(0.0, least=0, below=1)
    """Dropout on the adapters' input."""
    lora_target_modules: str = setting("auto", names=True, aliases=("lora_target", "target_modules"))
    """Comma-separated module names; auto or all-linear: every linear layer but the head; experts: a mixture's."""
    lora_modules_to_save: str | None = setting(None, names=True, aliases=("modules_to_save", "additional_target"))
    """Comma-separated modules that are trained whole beside the adapters, such as embed_tokens,lm_head."""
    random_base: bool = False
    """Train adapters over random weights (a preset's or a config_file's), where they learn little: to try out speed
    and memory."""
    use_dora: bool = setting(False, aliases=("peft_use_dora",))
    """DoRA: train the length of each output's weights beside the adapter, which then turns their direction."""
    use_rslora: bool = False
    """Scale adapters by lora_alpha / sqrt(lora_r) instead of lora_alpha / lora_r."""
    init_lora_weights: Literal["kaiming", "gaussian"] = setting("kaiming", words={"true": "kaiming", "on": "kaiming"})
    """Start of adapters: kaiming (peft's default) or gaussian; either way the model starts as the base."""
    quantize: Literal["none", "nf4", "int8"] = setting("none", common=True)
    """Keep the frozen base in 4 (nf4) or 8 bits (int8), in RAM, on NVMe and on the way to the GPU. QLoRA."""
    base_hash: Literal["sampled", "whole"] = "sampled"
    """Hash that a resumed run knows its base by: of samples of each tensor, or of all bytes (minutes for a big one)."""
    lora_export: Literal["merged", "adapter"] = "merged"
    """Export the merged model, or the adapter alone."""
