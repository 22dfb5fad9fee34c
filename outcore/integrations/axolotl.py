"""Streaming in axolotl: two lines of its YAML, and the rest stays as it is.

    plugins: [outcore.integrations.axolotl.OutcorePlugin]
    outcore_vram_gib: 6.5

The model is loaded into RAM and streamed before adapters are put on. Needs axolotl, which imports this module."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

import outcore.hf


class OutcoreArgs(BaseModel):
    """The plugin's keys, which mean what the arguments of `outcore.hf.stream` do."""

    outcore_vram_gib: float | None = None
    outcore_ram_gib: float | None = None
    outcore_nvme: str | list[str] | None = None
    outcore_quantize: str | None = None
    outcore_compile: str = "auto"


class OutcorePlugin(BasePlugin):
    """Plugin that axolotl calls: it streams the model that axolotl has built."""

    def get_input_args(self) -> str:
        return "outcore.integrations.axolotl.OutcoreArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """Load into RAM. ValueError for what packs the base in another way."""
        if cfg.load_in_4bit or cfg.load_in_8bit:
            raise ValueError(
                "outcore packs the base itself: leave load_in_4bit and load_in_8bit out, and give outcore_quantize: nf4"
            )
        cfg.device_map = "cpu"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        names = OutcoreArgs.model_fields
        outcore.hf.stream(model, **{name.removeprefix("outcore_"): getattr(cfg, name) for name in names})
