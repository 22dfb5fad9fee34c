"""`from_pretrained(name, quantization_config=OutcoreConfig(...))`: streaming by a plain argument, in any program.

transformers has a register of quantizers, which see a model before and after its weights are loaded. Ours streams it
after. Nothing then tells a streamed model from a plain one, so that it is trained and saved like that; where its base
is packed it stays marked as quantized, as trainers want to know it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from outcore.formats import PackedSpec, PackedTensor
from outcore.hf.ground import StreamOptions
from outcore.hf.homes import Elsewhere
from outcore.hf.stream import packed_on_arrival, stream


@register_quantization_config("outcore")
class OutcoreConfig(QuantizationConfigMixin):
    """Settings by which `from_pretrained` streams a model; arguments as for `stream`, `base` its `quantize`."""

    def __init__(
        self,
        vram_gib: float | None = None,
        ram_gib: float | None = None,
        nvme_offload_path: str | list[str] | None = None,
        base: str | None = None,
        compile: str = "auto",
        nvme: str | list[str] | None = None,
        **others: Any,
    ) -> None:
        others.pop("quant_method", None)
        if others:
            takes = "OutcoreConfig takes vram_gib, ram_gib, nvme_offload_path, base and compile"
            raise ValueError(f"{takes}, not {', '.join(sorted(others))}")
        self.quant_method: Any = "outcore"
        self.vram_gib, self.ram_gib, self.nvme_offload_path = vram_gib, ram_gib, nvme_offload_path or nvme
        self.base, self.compile = base, compile
        StreamOptions(**self.options)  # wrong ones are found before anything is loaded

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `StreamOptions`."""
        nvme = self.nvme_offload_path
        given = {"vram_gib": self.vram_gib, "ram_gib": self.ram_gib, "nvme": nvme, "quantize": self.base}
        return {**given, "compile": self.compile}


@register_quantizer("outcore")
class OutcoreQuantizer(HfQuantizer):
    """Streams a model once its weights are loaded, into RAM; a base that is to be packed is packed as it comes."""

    _packed: Mapping[str, PackedSpec] = MappingProxyType({})

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if (base := vars(self.quantization_config)["base"]) is not None:
            self._packed = packed_on_arrival(model, base)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return param_name in self._packed

    def get_quantize_ops(self) -> Any:
        return _Pack(self._packed)

    def update_device_map(self, device_map: Any) -> None:
        """Load into RAM: "auto", which many programs ask for, is what streaming does."""
        if device_map not in (None, "auto"):
            raise ValueError(
                f"device_map={device_map!r}: with OutcoreConfig outcore places the weights itself; leave device_map out"
            )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config: Any = self.quantization_config
        stream(model, **config.options)
        if config.base is None:
            self.remove_quantization_config(model)
            for module in model.modules():
                if hasattr(module, "config"):
                    module.config._is_quantized = False
        return model

    @property
    def is_trainable(self) -> Any:
        return True

    def is_serializable(self) -> Any:
        """Packed weights cannot be saved; adapters are, by peft."""
        return False


class _Pack(ConversionOps):
    """Packs what transformers has read of a checkpoint."""

    def __init__(self, packed: Mapping[str, PackedSpec]) -> None:
        self._packed = packed

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        values = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {
            name: Elsewhere.of(PackedTensor(self._packed[name], self._packed[name].pack(value)), value.dtype)
            for name, value in values.items()
        }
