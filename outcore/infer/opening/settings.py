"""Settings that a user may give for running a model; the rest follows from the machine (`outcore.sizing.inference`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from outcore.common.quantities import GIB
from outcore.flow import CompileChoice
from outcore.formats import QUANTIZE_CHOICES
from outcore.sizing.inference import PRESETS, Placement

Precision = Literal["auto", "bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class InferSettings:
    """ValueError for what cannot work, and for what would do nothing."""

    preset: str = "balanced"
    """Aim of the placement (--aim): latency, balanced or throughput."""
    device: str = "auto"
    """auto: the GPU if there is one."""
    precision: Precision = "auto"
    """auto: bf16 on a GPU, fp32 on a CPU."""
    adapter: str | None = None
    """Folder of a LoRA adapter to put beside the model's weights."""
    adapters: tuple[str, ...] = ()
    """Folders of LoRA adapters among which requests choose, by number from 1 (`Request.adapter`)."""
    quantize: str | None = None
    """Format that 16-bit weights are packed into as they are loaded; None: they stay as they are."""
    context: int | None = None
    """Tokens of prompt and answer together."""
    max_sequences: int | None = None
    """Answers written at the same time."""
    pass_tokens: int | None = None
    chunk_tokens: int | None = None
    page_tokens: int = 64
    kv_format: Literal["same", "int8"] = "same"
    kv_home: Literal["auto", "vram", "ram", "nvme"] = "auto"
    kv_gib: float | None = None
    vram_gib: float | None = None
    """Device memory to stay within; None: what is free."""
    ram_gib: float | None = None
    """RAM for weights, keys and values; None: what is free, less 2 GiB."""
    nvme_path: tuple[Path, ...] = ()
    """Folders for weights, keys and values that RAM does not hold."""
    pin_gib: float | None = None
    """Page-locked memory at most; None: as much as helps and the machine gives."""
    pin_memory: bool = True
    """Page-lock RAM that a GPU reads. False: only slots that everything passes through, which is slower."""
    buffer_mib: float | None = None
    """Size of such a slot; None: 16."""
    num_layer_buffers: int | None = None
    """Layers on the device at a time, of those that travel; None: 3."""
    prefetch: int | None = None
    """Travelling layers that are brought ahead of the one that computes: the buffers, less one."""
    draft_model: str | None = None
    """A small model with the same tokenizer that guesses tokens, whole in VRAM."""
    draft_tokens: int | None = None
    """Guessed tokens of a pass; 0: none. None: 64."""
    share_prefixes: bool = True
    prefix_path: Path | None = None
    """Folder where beginnings of prompts are kept for the next start; None: they are forgotten."""
    prefix_gib: float | None = None
    """Room there for each model; None: 8."""
    compile: CompileChoice = "auto"
    """Layers through torch.compile, small passes as CUDA graphs. auto: on a GPU, where it works."""
    cpu_tokens: int | None = None
    """Tokens up to which weights in RAM are multiplied by the CPU as they are; 0: never. None: measured."""
    expert_cache_gib: float | None = None
    """Memory of the device for a mixture's experts, which come as they are chosen; 0: they travel with their layers,
    which is better where passes of many tokens touch nearly all of them. None: a rule decides."""
    deterministic: bool = False
    """Give the same text whatever else runs: fixed shapes, guesses by the text alone. Slower."""
    trust_remote_code: bool = False
    pictures: bool = False
    """Open an image-text model whole, to answer about pictures, also where its text model could be opened alone."""
    scores_only: bool = False
    """Make room for scoring texts, not for answers."""

    def __post_init__(self) -> None:
        folders = (self.nvme_path,) if isinstance(self.nvme_path, str | Path) else self.nvme_path
        object.__setattr__(self, "nvme_path", tuple(Path(path).expanduser() for path in folders))
        if self.preset not in PRESETS:
            raise ValueError(f"aim is {self.preset!r}, but must be one of {', '.join(PRESETS)}.")
        if self.device not in ("auto", "cpu", "cuda") and not self.device.startswith("cuda:"):
            raise ValueError(f"device is {self.device!r}, but must be auto, cpu, cuda or cuda:N.")
        if self.precision not in ("auto", "bf16", "fp16", "fp32"):
            raise ValueError(f"precision is {self.precision!r}, but must be auto, bf16, fp16 or fp32.")
        if self.prefix_path is not None:
            object.__setattr__(self, "prefix_path", Path(self.prefix_path).expanduser())
        if self.kv_format not in ("same", "int8") or self.kv_home not in ("auto", "vram", "ram", "nvme"):
            raise ValueError("kv_format must be same or int8, kv_home auto, vram, ram or nvme.")
        if self.kv_home == "nvme" and not self.nvme_path:
            raise ValueError("kv_home nvme needs a folder on a drive (--nvme_offload_path).")
        if self.prefix_path is not None and not self.share_prefixes:
            raise ValueError("prefix_path does nothing without shared prefixes: leave out --no_prefix_sharing.")
        if self.prefix_gib is not None and self.prefix_path is None:
            raise ValueError("prefix_gib does nothing without --prefix_path. Give the folder, or leave it out.")
        if self.pin_gib is not None and not self.pin_memory:
            raise ValueError("pin_gib does nothing with pin_memory false. Leave one of them out.")
        if self.prefetch is not None and self.num_layer_buffers is not None:
            raise ValueError("prefetch and num_layer_buffers say the same in two ways. Leave one of them out.")
        if self.compile not in ("auto", "on", "off"):
            raise ValueError(f"compile is {self.compile!r}, but must be auto, on or off.")
        if self.draft_model is not None and self.draft_tokens == 0:
            raise ValueError("draft_model does nothing with draft_tokens 0. Leave one of them out.")
        if self.cpu_tokens and self.deterministic:
            raise ValueError("cpu_tokens does nothing where results may not depend on company (deterministic).")
        if self.expert_cache_gib and self.deterministic:
            raise ValueError("expert_cache_gib: which experts come together depends on company (deterministic).")
        if self.expert_cache_gib is not None and not self.expert_cache_gib >= 0:
            raise ValueError(f"expert_cache_gib is {self.expert_cache_gib!r}, but must be 0 or above.")
        if self.quantize is not None and self.quantize not in QUANTIZE_CHOICES:
            raise ValueError(f"quantize is {self.quantize!r}, but must be one of {', '.join(QUANTIZE_CHOICES)}.")
        for name, least in (
            ("context", 16),
            ("max_sequences", 1),
            ("pass_tokens", 16),
            ("chunk_tokens", 16),
            ("page_tokens", 1),
            ("num_layer_buffers", 1),
            ("prefetch", 0),
            ("draft_tokens", 0),
            ("cpu_tokens", 0),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name} is {value!r}, but must be a whole number of at least {least}.")
        for name in ("kv_gib", "vram_gib", "ram_gib", "pin_gib", "buffer_mib", "prefix_gib"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}, but must be above 0.")
        if self.pass_tokens is not None and self.chunk_tokens is not None and self.chunk_tokens > self.pass_tokens:
            raise ValueError(
                f"chunk_tokens ({self.chunk_tokens}) is above pass_tokens ({self.pass_tokens}): a chunk is part of a "
                "pass. Lower the one or raise the other."
            )

    def check_device(self, device_type: str) -> None:
        """ValueError for what does nothing on this kind of device."""
        if device_type == "cuda":
            return
        for name, idle in (("vram_gib", None), ("pin_gib", None), ("pin_memory", True), ("kv_home", "auto")):
            if getattr(self, name) != idle and (name, self.kv_home) != ("kv_home", "nvme"):
                raise ValueError(f"{name} does nothing on a CPU, where everything lives in RAM. Leave it out.")

    def check_placement(self, placement: Placement) -> None:
        """ValueError for what does nothing where everything lives as it does."""
        said = {
            "pin_gib": self.pin_gib is not None,
            "buffer_mib": self.buffer_mib is not None,
            "prefetch": self.prefetch is not None,
            "num_layer_buffers": self.num_layer_buffers is not None,
            "pin_memory": not self.pin_memory and placement.kv_home != "ram",
            "expert_cache_gib": bool(self.expert_cache_gib),
        }
        idle = next((name for name, is_said in said.items() if is_said), None)
        if idle is not None and not placement.travels:
            where = "VRAM" if placement.vram_bytes else "RAM"
            raise ValueError(f"{idle} does nothing: all weights live in {where}, so none travels. Leave it out.")

    def for_scoring(self) -> InferSettings:
        """Copy of the settings without room for answers, unless room was asked for."""
        asks = self.max_sequences is not None or self.kv_gib is not None
        return self if asks else replace(self, scores_only=True)

    @property
    def layer_buffers(self) -> int:
        """Travelling layers on the device at a time."""
        return self.num_layer_buffers or (3 if self.prefetch is None else self.prefetch + 1)

    @property
    def staging_bytes(self) -> int | None:
        """Page-locked memory at most; None: as much as helps."""
        if not self.pin_memory:
            return 1  # no more than the slots, which have their room in any case
        return None if self.pin_gib is None else int(self.pin_gib * GIB)

    @property
    def kv_bytes(self) -> int | None:
        return None if self.kv_gib is None else int(self.kv_gib * GIB)
