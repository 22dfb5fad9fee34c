"""Traffic of a step of the streaming engine, pass by pass, and how much of it overlaps.

Exact clipping needs the norm first, so updates run under the next forward pass; without it they start during the
backward pass. The formulas reproduce the prototype's measured runs within 20 % (tests/plan/test_stream.py); how far
they are from the engine itself is in docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from outcore.plan import constants as k
from outcore.plan.record import StepTime
from outcore.plan.terms import Case, Pass, Rates, Spill, Traffic, overlapped_s
from outcore.sizing.activations import long_link_bytes, mlp_activation_bytes
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.states import MOMENT_BYTES, STATE_FORMATS, muon_flops
from outcore.sizing.streaming import STAY_LAYERS
from outcore.sizing.tiles import Tiling
from outcore.sizing.training import TrainingPlacement


@dataclass(frozen=True)
class Placed:
    """Homes of everything of a case lives."""

    homes: TrainingPlacement
    spill: Spill
    """Shares of it on the drive."""
    pageable: float
    """Share of homes that is not pinned."""
    tiling: Tiling
    graphs: bool
    """Whether layers are CUDA graphs."""

    @property
    def stay_homes(self) -> int:
        """Bytes of layers that stay on the GPU, which cross the link no more."""
        return sum(layer.home_bytes for layer in self.homes.needs.layers[: self.homes.stays])

    @property
    def stay_trained(self) -> int:
        """Parameters that are updated there."""
        return sum(layer.trained for layer in self.homes.needs.layers[: self.homes.stays])

    @cached_property
    def waiting(self) -> float:
        """Share of the layers' parameters that is on the drive and yet need not be read."""
        layers = [layer.home_bytes for layer in self.homes.needs.layers]
        return sum(layers) and (sum(layers) - sum(self.homes.waits)) / sum(layers)

    @property
    def ahead(self) -> int:
        """Parameters whose updates may begin before the global norm is known."""
        return sum(self.homes.needs.parts[number].trained for number in self.homes.ahead)


def stream_rates(case: Case[StreamLayout], placed: Placed) -> StreamRates:
    """The machine's, as the engine reaches them."""
    compiled, hardware = _is_compiled(case, placed), case.hardware
    if hardware.copies_gb_per_s is not None:  # the cores that copy pageable homes are those of all ranks
        hardware = replace(hardware, copies_gb_per_s=hardware.copies_gb_per_s / hardware.num_gpus)
    return StreamRates(
        hardware,
        case.request.format,
        k.STREAM_DRIVE_SHARE,
        case.attention_share,
        1.0 if compiled else k.EAGER_SLOWDOWN,
        placed.pageable,
    )


class StreamRates(Rates):
    """Everything of a pass overlaps; what is between layers does not."""

    def seconds(self, traffic: Traffic) -> StepTime:
        """A pass takes its longest term and a residue of the second longest; before the first layer can start, the
        embedding is updated and then comes up, one after the other."""
        first, *rest = traffic.passes
        groups = [[one] for one in rest] if traffic.are_apart else [rest]
        found = [self.of(one) for one in traffic.passes]
        cpu_s = [self.cpu_s(first), *(self.cpu_s(*group) for group in groups)]
        gpu_s, drive_s = sum(one.gpu_s for one in found), sum(one.drive_s for one in found)
        h2d_s, d2h_s = sum(one.h2d_s for one in found), sum(one.d2h_s for one in found)
        between_s = self.hardware.host_s(traffic.between_layers)
        if self.hardware.is_cpu:  # the update computes where the layers do: one after the other
            step_s = gpu_s + sum(cpu_s) + max(0.0, drive_s - gpu_s)
        else:
            step_s = between_s + found[0].h2d_s + self.cpu_s(replace(first, copied_bytes=0.0))
            for group, beside_s in zip(groups, cpu_s[1:], strict=True):
                terms = [(one.gpu_s, one.h2d_s, one.d2h_s, one.drive_s) for one in map(self.of, group)]
                step_s += overlapped_s(*map(sum, zip(*terms, strict=True)), beside_s)
        read, alone = traffic.read_bytes, traffic.read_bytes + traffic.written_bytes
        device_s = sum(one.device_s for one in found)
        return StepTime(
            compute_s=device_s,
            h2d_s=h2d_s,
            d2h_s=d2h_s,
            drive_read_s=drive_s * read / alone if alone else 0.0,
            drive_write_s=drive_s * traffic.written_bytes / alone if alone else 0.0,
            cpu_optimizer_s=sum(cpu_s),
            host_overhead_s=gpu_s - device_s + between_s,
            step_s=step_s,
        )


def step_time(case: Case[StreamLayout], placed: Placed) -> tuple[Traffic, StepTime]:
    """Count what a step moves and how long it takes."""
    traffic, rates = stream_traffic(case, placed), stream_rates(case, placed)
    if placed.ahead:
        traffic = _with_updates_ahead(traffic, rates, placed.ahead)
    return traffic, rates.seconds(traffic)


def _with_updates_ahead(traffic: Traffic, rates: StreamRates, most_params: int) -> Traffic:
    """Beside backward so many updates as end with it: no more begin than the optimizer keeps up with."""
    first, forward, head, backward = traffic.passes
    of, alone_s = rates.of(backward), rates.cpu_s(backward)
    room_s = max(0.0, overlapped_s(of.gpu_s, of.h2d_s, of.d2h_s) - alone_s)
    one_s = rates.cpu_s(Pass(updated_params=1.0))
    begun = min(most_params, forward.updated_params, room_s / one_s if one_s else 0.0)
    forward = replace(forward, updated_params=forward.updated_params - begun)
    return replace(traffic, passes=(first, forward, head, replace(backward, updated_params=begun)))


def _is_compiled(case: Case[StreamLayout], placed: Placed) -> bool:
    return case.layout.compiled and len(placed.tiling.layers) < case.shape.num_layers  # tiled layers are eager


def stream_traffic(case: Case[StreamLayout], placed: Placed) -> Traffic:
    """Forward, with the updates of the step before where the norm comes first, and backward."""
    shape, layout, tiling = case.shape, case.layout, placed.tiling
    per_call = k.STREAM_EAGER_HOST_LAYERS_PER_CALL
    if _is_compiled(case, placed) or placed.graphs:
        per_call = k.STREAM_HOST_LAYERS_PER_CALL
    calls = shape.num_layers * layout.accumulation
    links = _Links(case, placed)
    head = 2.0 * case.micro_tokens * layout.accumulation * shape.head_weight_numel
    again = head if tiling.ends else 0.0
    head_back = head if shape.lora_r else 2 * head
    tokens = case.micro_tokens * layout.accumulation
    # On long rows the projections to queries, keys and values run once more back; uncompiled also beside the rest.
    projected = 2.0 * tokens * shape.num_layers * shape.hidden_size * (shape.num_heads + 2 * shape.num_kv_heads)
    projected *= shape.head_dim if tiling.tile_tokens else 0
    unused = 0.0 if _is_compiled(case, placed) else projected
    waits = (
        tiling.holding.layer_buffers == 1 and len(tiling.layers) < shape.num_layers
    )  # a layer comes when one has gone
    ring = 1 + 2 * placed.pageable  # pageable: once more through a slot, read and write
    through_drive = links.forward_read + links.forward_written
    # Each rank's copies pass over its own link and through the RAM of all; then the ranks' gradients are added up.
    ranks = case.hardware.num_gpus
    added_up = (ranks + 1) * links.down if ranks > 1 else 0
    first_bytes = 0 if tiling.ends else case.element_bytes * shape.embedding_params
    first_updated = 0 if shape.lora_r else shape.embedding_params
    first = Pass(h2d_bytes=first_bytes, copied_bytes=ranks * ring * first_bytes, updated_params=first_updated)
    rows_forward, rows_backward = links.rows
    up_forward = links.up_forward - first_bytes + rows_forward[0]
    moved = links.moved + rows_forward[1]
    forward = Pass(
        flops=case.flops.forward - head + unused,
        attention_flops=case.flops.attention_forward,
        device_bytes=case.device_bytes[0]
        + links.expanded
        + placed.stay_trained * k.OPTIMIZER_DRAM_BYTES[case.request.format],
        launched_layers=calls * per_call[0],
        h2d_bytes=up_forward + links.tiles.up_forward,
        d2h_bytes=moved,
        read_bytes=links.forward_read,
        written_bytes=links.forward_written,
        copied_bytes=ranks * ring * (up_forward + moved + links.tiles.up_forward) + through_drive,
        updated_params=shape.trainable_params - placed.stay_trained - first_updated,
        awaited_read_bytes=links.weights_forward if waits else None,
    )
    forward = _with_muon(case, forward, ring)
    # Nothing comes up beside the head: the layers that backward starts with are still in their buffers.
    at_head = Pass(flops=head + head_back + again, device_bytes=case.device_bytes[1])  # again: logits of tiles
    up_backward, down = links.up_backward + links.moved + rows_backward[0], links.down + rows_backward[1]
    back = up_backward + down + links.tiles.up_backward + links.tiles.gradients
    backward = Pass(
        flops=case.flops.backward - head_back + projected + unused,
        attention_flops=case.flops.attention_backward,
        device_bytes=case.device_bytes[2] + links.expanded,
        launched_layers=calls * per_call[1],
        h2d_bytes=up_backward + links.tiles.up_backward,
        d2h_bytes=down + links.tiles.gradients,
        read_bytes=links.backward_read,
        copied_bytes=ranks * ring * back + added_up + links.backward_read,
        awaited_read_bytes=links.weights_backward if waits else None,
    )
    passes = (first, forward, at_head, backward)
    between = k.STREAM_HOST_LAYERS_PER_UNIT * (shape.num_layers + (1 if shape.tied else 2))
    return Traffic(passes, are_apart=case.request.clips, between_layers=between)


def _with_muon(case: Case[StreamLayout], forward: Pass, ring: float) -> Pass:
    """The pass with Muon's updates beside it: states and gradients go up, with a split master the parameters, too;
    states and parameters come back. `ring`: bytes of RAM that one of them takes."""
    numel = case.muon_numel
    master, _ = STATE_FORMATS[case.request.format]
    is_split = master < 4
    down = (master + MOMENT_BYTES + case.element_bytes) * numel
    up = down + (case.element_bytes * numel if is_split else 0)
    return replace(
        forward,
        flops=forward.flops + sum(muon_flops(*sides) for sides in case.muon),
        device_bytes=forward.device_bytes + numel * (k.MUON_DEVICE_BYTES + is_split * k.MUON_SPLIT_BYTES),
        h2d_bytes=forward.h2d_bytes + up,
        d2h_bytes=forward.d2h_bytes + down,
        copied_bytes=forward.copied_bytes + ring * (up + down),
        updated_params=forward.updated_params - numel,
    )


@dataclass(frozen=True)
class _Links:
    """Bytes of a step over the link and the drive."""

    case: Case[StreamLayout]
    placed: Placed

    @property
    def head(self) -> int:
        """Elements that come up for the head."""
        shape = self.case.shape
        return shape.head_params + (shape.head_weight_numel if shape.tied else 0)

    @property
    def up_forward(self) -> int:
        shape = self.case.shape
        whole = shape.embedding_params + sum(shape.layer_params) + shape.adapter_params + self.head
        coming = self.case.element_bytes * whole - shape.saved_bytes(self.case.element_bytes)
        return coming - self.placed.stay_homes

    @property
    def up_backward(self) -> int:
        shape, e = self.case.shape, self.case.element_bytes
        coming = e * (sum(shape.layer_params) + shape.adapter_params) - shape.saved_bytes(e)
        coming -= self.placed.stay_homes
        # The last layers of forward, the first of backward, are still in their buffers.
        kept = min(self.placed.tiling.holding.layer_buffers, shape.num_layers - self.placed.homes.stays)
        return int(coming * (1 - kept / max(1, shape.num_layers - self.placed.homes.stays)))

    @property
    def expanded(self) -> int:
        """Bytes of packed layers that are read and written in the device's memory as they arrive, in each pass."""
        shape, e = self.case.shape, self.case.element_bytes
        return 2 * e * sum(shape.layer_params) - shape.saved_bytes(e) if shape.quantize else 0

    @property
    def moved(self) -> int:
        """Activation checkpoints, each way; the last layers' stay."""
        layers = self.case.shape.num_layers
        leaving = max(0, layers - STAY_LAYERS) * self.placed.homes.needs.checkpoint_ends[-1]
        in_vram = self.case.layout.checkpoints_home == "vram" or self.placed.tiling.tile_tokens
        return 0 if in_vram else leaving

    @cached_property
    def rows(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Long rows, ((up, down) in forward, (up, down) in backward)."""
        case = self.case
        if not self.placed.tiling.tile_tokens:
            return (0, 0), (0, 0)
        tokens = case.micro_tokens * case.layout.accumulation
        return long_link_bytes(case.shape, case.element_bytes, tokens, near=self.placed.tiling.holding.near)

    @property
    def down(self) -> int:
        """Gradients."""
        return self.case.element_bytes * (self.case.shape.trainable_params - self.placed.stay_trained)

    @cached_property
    def tiles(self) -> _TileTraffic:
        return _tile_traffic(self.case, self.placed.tiling, self.head)

    @property
    def states(self) -> float:
        """Optimizer states, each way."""
        stored = self.case.layout.stored_states(self.case.request.format)
        others = self.case.shape.trainable_params - self.case.muon_numel
        return self.placed.spill.states * (others * stored.moved + self.case.muon_bytes)

    @property
    def in_drive(self) -> int:
        """Activation checkpoints of all ranks that wait on the drive."""
        return self.case.hardware.num_gpus * self.moved if self.case.layout.checkpoints_home == "nvme" else 0

    @property
    def forward_read(self) -> float:
        return self.weights_forward + self.placed.spill.parameters * self.tiles.weights_forward + self.states

    @property
    def forward_written(self) -> float:
        weights = self.placed.spill.parameters * self.case.element_bytes * self.case.shape.total_params
        return self.states + self.in_drive + (weights if not self.case.shape.lora_r else 0.0)

    @property
    def backward_read(self) -> float:
        return self.weights_backward + self.placed.spill.parameters * self.tiles.weights_backward + self.in_drive

    @property
    def weights_forward(self) -> float:
        """Parameters that are read from the drive, those of tiles once more apart."""
        layers = self.case.element_bytes * sum(self.case.shape.layer_params) - self.placed.stay_homes
        return self.placed.spill.parameters * self.up_forward - self.placed.waiting * layers

    @property
    def weights_backward(self) -> float:
        return (self.placed.spill.parameters - self.placed.waiting) * self.up_backward


@dataclass(frozen=True)
class _TileTraffic:
    """Bytes beyond the untiled ones over the link in a step."""

    ends: float = 0.0
    """Up in forward, from RAM."""
    weights_forward: float = 0.0
    weights_backward: float = 0.0
    """Bytes of layers, up, from where they live."""
    gradients: float = 0.0
    """Bytes of layers, down in parts and up again, each way, all in backward."""

    @property
    def up_forward(self) -> float:
        return self.ends + self.weights_forward

    @property
    def up_backward(self) -> float:
        return self.weights_backward + self.gradients


def _tile_traffic(case: Case[StreamLayout], tiling: Tiling, head: int) -> _TileTraffic:
    """Traffic of tiles (docs/tiling.md).

    A tiled layer's weights come up once in forward and twice in backward of each micro-batch, and once more in each of
    these for every further chunk of tokens through its MLP. Gradients in parts wait in RAM and come up again. The
    head's weights come up a second time; of the embedding only rows that occur.
    """
    shape, e, passes, micro_tokens = case.shape, case.element_bytes, case.layout.accumulation, case.micro_tokens
    ends = 0.0
    if tiling.ends:
        rows = min(shape.vocab_size, micro_tokens * passes) * shape.hidden_size
        ends = e * (head - shape.embedding_params + rows)
    if not tiling.layers:
        return _TileTraffic(ends)
    chunks = 1
    if tiling.chunk_bytes is not None:
        chunks = -(-mlp_activation_bytes(shape, e, micro_tokens) // tiling.chunk_bytes)
    weights = e * sum(shape.layer_params[i] for i in tiling.layers)
    parts = passes * chunks
    again = 0.0
    if parts > 1 and not shape.lora_r:
        again = weights + 2 * weights * (parts - 2)  # the first part as it is, sums of several in fp32
    return _TileTraffic(
        ends, weights * (passes * chunks - 1), weights * (passes * (2 if chunks == 1 else 3 * chunks) - 1), again
    )
