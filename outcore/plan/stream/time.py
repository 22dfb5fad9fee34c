"""Seconds of a step of the streaming engine by term, and how much of them overlaps.

Exact clipping needs the norm first, so updates run under the next forward pass; without it they start during the
backward pass. The formulas reproduce the prototype's measured runs within 20 % (tests/plan/test_stream.py); how far
they are from the engine itself is in docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.common.quantities import GB
from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.record import StepTime
from outcore.plan.request import RunRequest
from outcore.plan.stream.layout import Spill, StreamLayout
from outcore.plan.stream.tiles import Tiling
from outcore.plan.work import overlapped_s, step_flops, step_traffic
from outcore.sizing.activations import has_masks, mlp_activation_bytes
from outcore.sizing.shape import ModelShape


def step_time(
    shape: ModelShape, request: RunRequest, hardware: Hardware, seq_length: int, layout: StreamLayout,
    sizes: dict[str, int], spill: Spill, pageable: float, all_checkpoints: int, tiling: Tiling,
    *, graphs: bool,
) -> tuple[StepTime, float, float]:  # fmt: skip
    """The step, and the bytes the drive reads and writes in it. `pageable`: share of homes that is not pinned;
    `graphs`: layers are CUDA graphs."""
    e, trained = request.element_bytes, shape.trainable_params
    micro_tokens = seq_length * layout.micro_batch
    flops = step_flops(shape, request, seq_length, micro_tokens * layout.accumulation)
    traffic = step_traffic(shape, request, seq_length, micro_tokens, layout.accumulation)
    compiled = layout.compiled and len(tiling.layers) < shape.num_layers  # tiled layers are eager
    slower = 1.0 if compiled else k.EAGER_SLOWDOWN
    again = 2.0 * micro_tokens * layout.accumulation * shape.head_weight_numel if tiling.ends else 0.0  # its logits
    share = k.MASKED_ATTENTION_SHARE if has_masks(layout.packed_attention, request.element_bytes) else k.ATTENTION_SHARE
    device_s = [
        slower * hardware.compute_s(flops.forward, traffic.forward, flops.attention_forward, share),
        slower * hardware.compute_s(flops.backward + again, traffic.backward, flops.attention_backward, share),
    ]
    per_call = k.STREAM_HOST_LAYERS_PER_CALL if compiled or graphs else k.STREAM_EAGER_HOST_LAYERS_PER_CALL
    calls = shape.num_layers * layout.accumulation
    gpu_s = [max(seconds, hardware.host_s(calls * call)) for seconds, call in zip(device_s, per_call, strict=True)]
    head = shape.head_params + (shape.head_weight_numel if shape.tied else 0)
    up_forward = e * (shape.embedding_params + sum(shape.layer_params) + shape.adapter_params + head)
    up_backward = e * (sum(shape.layer_params) + shape.adapter_params)
    moved = all_checkpoints if layout.checkpoints_home != "vram" else 0
    down = e * trained
    tiles = _tile_traffic(shape, request, micro_tokens, layout, tiling, head)
    extra_forward, extra_backward = tiles.ends + tiles.weights_forward, tiles.weights_backward + tiles.gradients
    states = spill.states * trained * layout.stored_states(request.format).moved
    weights = spill.parameters * e * shape.total_params
    in_drive = moved if layout.checkpoints_home == "nvme" else 0
    forward_read = spill.parameters * (up_forward + tiles.weights_forward) + states
    forward_written = states + in_drive + (weights if not shape.lora_r else 0.0)
    backward_read = spill.parameters * (up_backward + tiles.weights_backward) + in_drive
    backward_written = 0.0
    ring = 1 + 2 * pageable  # a pageable home is copied once more, through a slot: a read and a write
    copied_bytes = [
        ring * copied + through_drive
        for copied, through_drive in (
            (up_forward + moved + extra_forward, forward_read + forward_written),
            (up_backward + moved + down + extra_backward + tiles.gradients, backward_read + backward_written),
        )
    ]
    h2d_rate, d2h_rate = (
        hardware.with_copies(link, pageable) * GB for link in (hardware.h2d_gb_per_s, hardware.d2h_gb_per_s)
    )
    drive_s = [
        hardware.drive_s(read, written) / k.STREAM_DRIVE_SHARE
        for read, written in ((forward_read, forward_written), (backward_read, backward_written))
    ]
    h2d_s = [(up_forward + extra_forward) / h2d_rate, (up_backward + moved + extra_backward) / h2d_rate]
    d2h_s = [moved / d2h_rate, (down + tiles.gradients) / d2h_rate]
    if tiling.holding.layer_buffers == 1 and len(tiling.layers) < shape.num_layers:  # a layer comes when one has gone
        reads_s = [hardware.drive_s(spill.parameters * up, 0.0) for up in (up_forward, up_backward)]
        gpu_s = [gpu + max(up, read) for gpu, up, read in zip(gpu_s, h2d_s, reads_s, strict=True)]
    if request.clips:  # updates wait for the norm, then run under the next forward pass
        update_s = [
            hardware.update_s(request.format, trained, copied_bytes[0]),
            hardware.copies_s(copied_bytes[1]),
        ]
        step_s = overlapped_s(gpu_s[0], h2d_s[0], d2h_s[0], update_s[0], drive_s[0])
        step_s += overlapped_s(gpu_s[1], h2d_s[1], d2h_s[1], update_s[1], drive_s[1])
    else:
        update_s = [hardware.update_s(request.format, trained, sum(copied_bytes))]
        step_s = overlapped_s(sum(gpu_s), sum(h2d_s), sum(d2h_s), sum(update_s), sum(drive_s))
    between_s = hardware.host_s(k.STREAM_HOST_LAYERS_PER_UNIT * (shape.num_layers + (1 if shape.tied else 2)))
    step_s += between_s
    if hardware.is_cpu:  # the update computes where the layers do: one after the other
        step_s = sum(gpu_s) + sum(update_s) + max(0.0, sum(drive_s) - sum(gpu_s))
    read, written = forward_read + backward_read, forward_written + backward_written
    both_s, alone = sum(drive_s), read + written
    return (
        StepTime(
            compute_s=sum(device_s),
            h2d_s=sum(h2d_s),
            d2h_s=sum(d2h_s),
            drive_read_s=both_s * read / alone if alone else 0.0,
            drive_write_s=both_s * written / alone if alone else 0.0,
            cpu_optimizer_s=sum(update_s),
            host_overhead_s=sum(gpu_s) - sum(device_s) + between_s,
            step_s=step_s,
        ),
        read,
        written,
    )


@dataclass(frozen=True)
class _TileTraffic:
    """Bytes beyond the untiled ones over the link in a step."""

    ends: float = 0.0
    """Up in forward, from RAM."""
    weights_forward: float = 0.0
    weights_backward: float = 0.0
    """Of layers, up, from where they live."""
    gradients: float = 0.0
    """Of layers, down in parts and up again, each way, all in backward."""


def _tile_traffic(
    shape: ModelShape, request: RunRequest, micro_tokens: int, layout: StreamLayout, tiling: Tiling, head: int
) -> _TileTraffic:
    """See docs/tiling.md.

    A tiled layer's weights come up once in forward and twice in backward of each micro-batch, and once more in each of
    these for every further chunk of tokens through its MLP. Gradients in parts wait in RAM and come up again. The
    head's weights come up a second time; of the embedding only rows that occur.
    """
    e, passes = request.element_bytes, layout.accumulation
    ends = 0.0
    if tiling.ends:
        rows = min(shape.vocab_size, micro_tokens * passes) * shape.hidden_size
        ends = e * (head - shape.embedding_params + rows)
    if not tiling.layers:
        return _TileTraffic(ends)
    chunks = 1
    if tiling.chunk_bytes is not None:
        chunks = -(-mlp_activation_bytes(shape, request.element_bytes, micro_tokens) // tiling.chunk_bytes)
    weights = e * sum(shape.layer_params[i] for i in tiling.layers)
    parts = passes * chunks
    again = 0.0
    if parts > 1 and not shape.lora_r:
        again = weights + 2 * weights * (parts - 2)  # the first part as it is, sums of several in fp32
    return _TileTraffic(
        ends, weights * (passes * chunks - 1), weights * (passes * (2 if chunks == 1 else 3 * chunks) - 1), again
    )
