"""What the streaming engine chose for a run, printable, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from outcore.common.classes import same_named
from outcore.config import RunSettings
from outcore.engine.base import Engine, grouped
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.ranks import ALONE, RankPlace
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.weights import choose_verification
from outcore.formats import open_packed
from outcore.model import LoadedModel, load_model
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.training import TrainingPlacement

CHECKPOINT_HOMES = {"device": "vram", "ram": "ram", "nvme": "nvme"}


def stream_layout(told: StreamSettings, micro_batch: int, accumulation: int, device: str) -> StreamLayout:
    """What bytes and seconds depend on of these settings."""
    own = ("micro_batch", "accumulation", "checkpoints_home", "layer_buffers", "compiled", "cuda_graphs")
    return StreamLayout(
        micro_batch,
        accumulation,
        checkpoints_home=CHECKPOINT_HOMES[told.activations_on(torch.device(device))],
        layer_buffers=told.num_layer_buffers,
        compiled=device != "cpu" and told.compile != "off",
        cuda_graphs=told.cuda_graphs == "auto",
        **same_named(StreamLayout, told, *own),
    )


@dataclass(frozen=True)
class StreamDecision:
    """The engine's settings, and one line for each thing that was decided; see `Decision`."""

    settings: RunSettings
    told: StreamSettings
    device: str
    placed: TrainingPlacement
    """Homes of all that the run keeps."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    """Keys of deepspeed_config.json that the engine has no use for."""
    shortage: str = ""
    """Why the run does not fit this machine's RAM, and what to do; '' when it does. A run is refused with it."""
    reason: str = ""
    is_auto: bool = False
    loaded: LoadedModel | None = None
    name: str = "stream"
    draws_timeline: bool = True

    @property
    def nvme_path(self) -> str | None:
        """The first folder that takes what RAM does not hold."""
        return next(iter(self.told.nvme_paths), None)

    @property
    def state_format(self) -> str:
        """How optimizer states are kept."""
        return self.told.states

    @property
    def layout(self) -> StreamLayout:
        """How the model is run, as the planner counts it."""
        micro, accumulation = self.settings.per_device_train_batch_size, self.settings.gradient_accumulation_steps
        return stream_layout(self.told, micro, accumulation, self.device)

    def words(self) -> list[str]:
        """Lines to show before anything is read or built."""
        lines = [f"WARNING: {warning}" for warning in dict.fromkeys(self.warnings)]
        lines += [f"engine: {note}" for note in self.notes]
        if self.nvme_path is not None:
            lines.append(f"engine: {choose_verification(self.told.nvme_checksums).words}")
        unused = f"engine: without effect here, of the DeepSpeed file: {grouped(self.unused, most=2)}"
        return [*lines, *([unused] if self.unused else [])]

    def record(self) -> dict[str, Any]:
        """Plain values for plan.json."""
        return {"stream": asdict(self.told), "unused": self.unused}

    def forget(self) -> None:
        """Undo what deciding left behind: nothing."""

    def open(self, model: Any, tokenizer: Any, say: Callable[[str], None]) -> Engine:
        """Load the model, once, and make the engine. StreamUnsupported (a ValueError) when it turns out that it cannot
        be streamed; no weight has been read then unless `loaded` was there."""
        loaded = self.loaded or load_model(model, tokenizer=tokenizer, lazy=True, packed_feed=open_packed)
        place, told = self._place(), self.told
        if not place.is_alone:
            told = place.exchange(told)[0]  # free RAM and the drive's speed, as each rank found them, differ a little
        engine = build_stream_engine(loaded, told, device=self.device, place=place)
        for note in loaded.notes:
            say(f"model: {note}")
        say(f"engine: {engine.describe()}")
        return engine

    def _place(self) -> RankPlace:
        world_size = self.settings.world_size
        if world_size == 1:
            return ALONE

        def exchange(mine: Any) -> list[Any]:
            found: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(found, mine)
            return found

        return RankPlace(torch.distributed.get_rank(), world_size, exchange)
