"""Resources that the streamed lists of one model share: the device, memory for homes, and the lanes between both."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from outcore.common.quantities import GIB, MIB
from outcore.flow import let_segments_grow
from outcore.flow.weights import Scratch
from outcore.formats import QUANTIZE_CHOICES
from outcore.hf.homes import GradientMemory, LastingMemory
from outcore.sizing.streaming import NUM_SLOTS, PAGEABLE_SLOTS, SLOT_BYTES
from outcore.staging import DownloadLane, LaneSettings, LaneTransfer, PinnedPool, UploadLane, whole_device

FREE_SHARE = 0.9
"""Share of the device's free memory that is used where no `vram_gib` is told."""
CPU_SLOT_BYTES = 4 * MIB
MOST_GOING = 2
"""Tensors on their way to RAM at once: one is copied, the next one is computed."""


@dataclass(frozen=True)
class StreamOptions:
    """Settings by which a model is streamed. Raises ValueError for settings that contradict each other."""

    vram_gib: float | None = None
    """Device memory for all of it at most; None: what is free."""
    ram_gib: float | None = None
    """With `nvme`: RAM for the layers' frozen weights at most; None: none of them stays in RAM."""
    nvme: str | Path | Sequence[str | Path] | None = None
    """A folder on a drive, or one on each of several, where frozen weights of the layers lie."""
    quantize: str | None = None
    """nf4 or int8: frozen matrices of the layers are packed so."""
    compile: str = "auto"
    """Layers through torch.compile while they are trained; auto: on a GPU."""

    def __post_init__(self) -> None:
        for name in ("vram_gib", "ram_gib"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0 (GiB), got {value}")
        if self.ram_gib is not None and self.nvme is None:
            raise ValueError(
                "ram_gib limits the weights in RAM; the rest needs a place: give nvme_offload_path, a folder"
            )
        if self.quantize not in (None, *QUANTIZE_CHOICES):
            raise ValueError(f"quantize must be {' or '.join(QUANTIZE_CHOICES)}, got {self.quantize!r}")
        if self.compile not in ("auto", "on", "off"):
            raise ValueError(f"compile must be auto, on or off, got {self.compile!r}")

    @property
    def folders(self) -> list[Path]:
        """Folders on drives."""
        if self.nvme is None:
            return []
        return [Path(path) for path in ([self.nvme] if isinstance(self.nvme, (str, Path)) else self.nvme)]


class Streaming:
    """State of one streamed model. What its lists share is opened by the first pass, and anew in a copy or a pickle."""

    def __init__(self, options: StreamOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self.ends_bytes = 0
        """Bytes that stay on the device for good: of the weights around the layers."""
        self.layers_bytes = 0
        """All layers' weights at home."""
        self.buffers_bytes = 0
        """Buffers on the device through which the layers' weights pass."""
        self._ends: list[weakref.ref[torch.nn.Parameter]] = []
        self._ground: Ground | None = None
        _ALIVE.add(self)

    @property
    def compiles(self) -> bool:
        """Whether layers in training mode are to run through torch.compile."""
        choice = self.options.compile
        return choice == "on" or (choice == "auto" and self.device.type == "cuda")

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "budget_bytes"}
        return {**kept, "_ground": None, "_ends": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _ALIVE.add(self)

    def see_ends(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take note of what lies around the layers."""
        self._ends = [weakref.ref(p) for p in parameters]
        self.ends_bytes = sum(p.nbytes for p in parameters)

    @property
    def ends_gradient_bytes(self) -> int:
        """Bytes that gradients of the ends take on the device, by what is trained of them now."""
        return sum(p.nbytes for end in self._ends if (p := end()) is not None and p.requires_grad)

    @cached_property
    def budget_bytes(self) -> int | None:
        """Device memory for this model, without what the process's other streamed models hold there: a policy, its
        reference and a reward model share one budget. Asked once, by the first pass, so that a resumed run finds the
        same room."""
        if (budget := self.ground.budget_bytes) is None:
            return None
        gc.collect()  # models that nobody has any more
        others = [other for other in _ALIVE if other is not self and other.device == self.device]
        held = sum(other.ends_bytes + other.ends_gradient_bytes + other.buffers_bytes for other in others)
        return max(0, budget - held)

    @property
    def ground(self) -> Ground:
        """Memory and lanes."""
        if self._ground is None:
            self._ground = Ground(self.options, self.device, self.layers_bytes)
        return self._ground


_ALIVE: weakref.WeakSet[Streaming] = weakref.WeakSet()
"""All streamed models of the process: the device that they share is the process's, too."""


class Ground:
    """Lanes and memory of one streamed model, open until nobody streams over it any more."""

    def __init__(self, options: StreamOptions, device: torch.device, layers_bytes: int) -> None:
        self.device = device
        let_segments_grow(device)
        self._opened = opened = ExitStack()
        weakref.finalize(self, opened.close)
        is_cpu = device.type == "cpu"
        slots = LaneSettings(CPU_SLOT_BYTES if is_cpu else SLOT_BYTES, NUM_SLOTS if is_cpu else PAGEABLE_SLOTS)
        pool = opened.enter_context(PinnedPool(2 * slots.num_slots * slots.slot_bytes, device=device))
        self.upload = opened.enter_context(UploadLane(pool, None, device, slots))
        self.download = opened.enter_context(DownloadLane(pool, None, device, slots))
        self.scratch = opened.enter_context(Scratch(options.folders)) if options.folders else None
        self._slots, self._drives = slots, dict[Hashable, UploadLane]()
        self.ram_share = min(1.0, (options.ram_gib or 0) * GIB / max(1, layers_bytes))
        """Share of each layer's weights that RAM has, where their rest lies on a drive."""
        self.memory = LastingMemory(device)
        self.forget_gradients()
        self.budget_bytes = _budget(options, device)
        self._rooms: list[torch.Tensor] = []
        self._going: deque[LaneTransfer] = deque()

    def forget_gradients(self) -> None:
        """Gradients will have other sizes: no RAM is kept for those that were."""
        self.gradients = GradientMemory(self.memory)

    def drive(self, key: Hashable, n_bytes: int) -> UploadLane | None:
        """The lane of weights on a drive, `n_bytes` a pass, that no other key has: reads of a whole pass wait in it for
        room on the device, and what another one needs before would wait behind them. None: nothing is on a drive."""
        if self.scratch is None:
            return None
        if key not in self._drives:
            slot_bytes, most = self._slots.slot_bytes, self._slots.num_slots
            slots = replace(self._slots, num_slots=max(2, min(most, -(-n_bytes // slot_bytes))))
            pool = self._opened.enter_context(PinnedPool(slots.num_slots * slot_bytes, device=self.device))
            lane = UploadLane(pool, None, self.device, slots, owner="weights from NVMe")
            self._drives[key] = self._opened.enter_context(lane)
        return self._drives[key]

    def send_down(self, source: torch.Tensor, ram: torch.Tensor, label: str) -> LaneTransfer:
        """Send a tensor of the device to RAM. Waits where `MOST_GOING` have not arrived: the host may be a whole pass
        ahead of the device, which would hold what all layers send."""
        while len(self._going) >= MOST_GOING:
            if not (first := self._going.popleft()).done():
                first.wait()
        self._going.append(self.download.submit_host(source, ram, label=label))
        return self._going[-1]

    def take_room(self, n_bytes: int) -> torch.Tensor:
        """RAM for hidden states, uint8, of at least so many bytes: what `give_room` got back, or new."""
        self._rooms = rooms = sorted(self._rooms, key=len)
        at = next((at for at, room in enumerate(rooms) if len(room) >= n_bytes), None)
        if at is not None:
            return rooms.pop(at)
        # Batches of every length would otherwise leave rooms of their own behind: a larger one takes the place of one
        # that is too small.
        del rooms[-1:]
        return self.memory.take(n_bytes, "hidden states")

    def give_room(self, room: torch.Tensor) -> None:
        """Nobody uses it any more."""
        self._rooms.append(room)


def _budget(options: StreamOptions, device: torch.device) -> int | None:
    """Device memory for the model, its activations included. None: nobody limits it (a CPU without `vram_gib`)."""
    told = None if options.vram_gib is None else int(options.vram_gib * GIB)
    if device.type == "cpu":
        return told
    free_bytes = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device)
    return int(free_bytes * FREE_SHARE) if told is None else min(told, free_bytes)


def device_of(device: torch.device | str | None) -> torch.device:
    """Choose where a model is computed: on the GPU if there is one."""
    return whole_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
