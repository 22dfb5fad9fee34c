"""Every number the planner did not get from the machine, with its source beside it.

Measured means: on a server with one H200 (989 TFLOPS dense bf16, PCIe 5.0 x16 at 55 GB/s, STREAM triad 180 GB/s, drive
3.4-4.8 GB/s mixed), Llama of 1.21 B parameters (hidden 2048, 24 layers, vocabulary 32,000), sequences of 1,024, unless
said otherwise. "Prototype" is a throw-away layer-streaming trainer that was raced there against stock DeepSpeed 0.19.8.
(R) are twelve runs of November 2026 before any constant was fitted, on another server of that kind (784 TFLOPS of
matrix products, STREAM triad 82 GB/s, drive 3.0 GB/s mixed); (S) eleven more, after which the constants were set once
more; (H) some of these with one setting changed; (T) twelve more, the first with the host's own rate; (E) eager layers
with and without CUDA graphs in one call, 16,384 tokens a step in micro-batches of 4,096; (M) six runs before all of
these. What was measured there and is scaled to another machine is a forecast, and shown as one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from outcore.common.quantities import GIB, MIB

# --- bytes per parameter

CHECKPOINT_STATE_BYTES = 12
"""Beside the weight in the run's precision: exact fp32 master 4, fp32 moments 8. Checkpoints are engine-neutral
whatever the format of the states."""

# --- framework

GPU_CONTEXT_BYTES, GPU_CONTEXT_SHARE = int(0.59 * GIB), 0.0016
"""CUDA context and libraries: so much on any card, and of its memory. Measured (M) on an H200 of 140 GiB: 0.87-0.89 GB
that the driver counts and the allocator does not, in six runs. Smaller cards are
scaled: a context grows with the chip and its memory; that an 8 GiB card takes 0.60 GiB is assumed, not measured."""
GPU_SPARE_BYTES = int(0.15 * GIB)
"""Bytes that the allocator rounds up and keeps for later, with segments that grow. Measured without graphs: 0.16 GB,
0.01 (R), 0.08 (H); DeepSpeed below ZeRO-3 0.17 (S)."""
ZERO3_SPARE_SHARE = 0.82
"""Spare share of DeepSpeed's ZeRO-3, of the parameters that it gathers and frees again, of many sizes: 0.61-0.62 GB of
0.86 with 0.4 B parameters (S), 1.06 of 1.13 with 1.2 B (H)."""
NCCL_BYTES = int(0.49 * GIB)
"""NCCL's communicator, which DeepSpeed makes even for one rank. Measured (R): 1.39-1.40 GB that the driver counts and
the allocator does not in four runs of DeepSpeed, 0.87-0.89 in eight of the streaming engine."""
VRAM_RESERVE_BYTES = int(0.75 * GIB)
"""For the desktop and what else draws on the card. With all of these an 8 GiB card is planned with 6.5 GiB of tensors,
the cap under which the streaming engine is accepted."""
GRAPH_WORKSPACE_BYTES, EAGER_GRAPH_POOL = 2 * 32 * MIB, 0.86
"""Bytes of cuBLAS's workspaces that graphs of layers keep (of two threads, as large as on Hopper), and the share of an
eager layer's activations that they keep for intermediate results, of which nobody else may use any (compiled layers: as
many bytes as are planned outside of graphs). Measured (E), eager: 0.219 GB more of tensors, which is the workspaces and
nine of a micro-batch's hidden states to 1.1 MB, and 0.698 GB more reserved, 0.479 beyond them; a layer's activations
are planned with 0.558."""
WSL2_PINNED_BYTES = 512 * MIB
"""Reports of what WSL2 lets a process pin range from 0.5 to 5 GB; the least of them."""

# --- batch

DEFAULT_MICRO_BATCH = 2
DEFAULT_GLOBAL_BATCH = 8
"""Sequences per step and GPU: deepspeed_config.json's micro-batch 2 x accumulation 4."""
DEFAULT_SEQ_LENGTH = 1024
ATTENTION_BACKWARD = 2.5
"""Times attention's forward: five matrix products for two, as flash-attention's own benchmark counts."""
ATTENTION_SHARE, MASKED_ATTENTION_SHARE = 0.46, 0.26
"""Share of the rate of a layer's matrix products that attention reaches, by the causal FLOPs of whole rows. Without a
mask 0.46 (340 of 728 TFLOPS; FlashAttention-3's paper says 35 % of the peak, 346 TFLOPS, of FlashAttention-2 on an
H100); with one, torch's memory-efficient kernel computes the whole square and 0.18 is left, 0.26 where half of the
micro-batches have a row with several documents. Both from one run on an H200 (R, 8,192 tokens, head 64): 0.265 s a step
before the first packed row, 0.32 s after it; half: counted in the benchmark's text. Both engines go by documents'
borders instead of masks (outcore/model/packed/trial.py); that a row of several documents then takes less than a row
of one is not counted, because their lengths are not known. Heads of 128 and older chips do better (FlashAttention-2: 50
to 73 % of an A100's peak, where products of matrices reach 80)."""
LONG_ATTENTION_SHARE, ATTENTION_SLOW_TOKENS = 0.68, 1060
"""This share in training, by the length of rows: 0.68 of rows without end, half of it of rows of 1,060 tokens. Fitted
to an H100 whose products reach 763 TFLOPS, heads of 128, forward twice and backward once: 255 TFLOPS on rows of 1,024
tokens and 590 on one of 32,768, by the times of cuDNN's kernels; about 500 and 470 on one of 131,072 and 262,144, in
runs of minutes, which make a card warm."""
LOSS_BYTES_PER_LOGIT = 30
"""Written and read per logit of the loss: 16-bit logits, fp32 copy, softmax, gradient, 16-bit gradient."""

CAPPED_BYTES_PER_LOGIT = 13
"""Written and read besides, per byte of an element, where the head caps its logits: a division, tanh and a product, of
2 passes each forward and 2 or 3 backward. Derived from transformers' code (Gemma 2), not measured."""
SCORE_PASSES = 5
"""Over the scores of attention where no kernel fuses it, forward: written, read twice by the softmax and written,
read. Backward and recomputation three times that, as for the rest of a layer. Derived, not measured."""

# --- rates

MATMUL_SHARE = 0.93
"""Share of the measured rate of large matrix products that those of a layer reach. Prototype, measured: 158 TFLOP in
0.290 s on a GPU of about 720 TFLOPS, less what passes through its memory."""
HOST_LAYER_S = 0.0044
"""Seconds in which one core launches an eager decoder layer, forward, recomputation and backward
(outcore/probe/bench/host.py), where the probe did not measure it. Measured (H): 0.0038-0.0051 within four minutes on
one host, which had other guests. The host's terms are in such layers, because hosts differ by half. It was not measured
in (S): DeepSpeed's two kinds of runs there both say 0.0057."""
STREAM_HOST_LAYERS_PER_CALL = (0.18, 0.18)
"""Python and launches of one compiled layer on one micro-batch, forward and backward. Measured (S), 0.4 B parameters on
an H200: 0.107 s of a backward pass of 24 layers and 4 micro-batches, some of it waits for copies. Taken for eager
layers in CUDA graphs, too, which are called in the same way: not measured, in (E) the GPU's own time was longer."""
STREAM_EAGER_HOST_LAYERS_PER_CALL = (0.55, 1.2)
"""Host's time of an eager layer without graphs, recomputation included: where it has dropout or a balancing loss, or
computes long, or the GPU is full. Measured, 0.4 B parameters, 24 layers and 2 micro-batches,
nowhere near the GPU's own time: 0.101-0.118 and 0.232-0.256 s beside 4.0 ms (T); 0.103 and 0.238 s (H), 0.099 and
0.172 s (R). (E): 0.193 and 0.580 s of 4 micro-batches, where the rate of the host was not measured."""
STREAM_HOST_LAYERS_PER_UNIT = 0.16
"""Between the passes of a step, per layer, embedding and head: the batch, the norm, handing updates over. Measured
(M): 0.016-0.036 s a step outside the passes with 26 to 34 units."""
EAGER_SLOWDOWN = 1.5
"""Eager against compiled layers, on the GPU. Prototype, measured: 0.482 s against 0.324 s a step. The engine with
graphs: 0.484 s in both passes (E) against 0.330 compiled, on another machine of the kind
(train-1.2b-16k-h200.json)."""
DRAM_SHARE = 0.78
"""Share of the triad rate that the CPU optimizer reaches, used where the optimizer itself was not measured. Prototype,
measured: 5 Gparam/s at 28 B and 10 Gparam/s at 14 B per parameter, both 140 of 180 GB/s."""
OPTIMIZER_DRAM_BYTES: Mapping[str, float] = MappingProxyType(
    {"fp32": 28, "split": 26, "fp32_m8": 16.1, "split8": 14.1, "fp24_m8": 12.1}
)
"""DRAM bytes per parameter of one update: gradient 2 read, parameter 2 (split: 2 + 2), each state read and written."""
MUON_DEVICE_BYTES, MUON_SPLIT_BYTES = 122, 70
"""Bytes per parameter that one of Muon's updates reads and writes in the GPU's memory beside its products, and more of
a split master. Counted in `torch.optim.Muon` and outcore/optim/gpu.py: the gradient in fp32 and scaled 14, momentum and
what is made orthogonal 24, that in bf16 and of norm 1 12, copied before each of five products 20, decay and step 18,
the parameter rounded and stored 34. Split: joined 60, its residual 10."""
STREAM_DRIVE_SHARE = 0.95
"""Share of the mixed drive rate. Measured, of the phase that waits for the drive: prototype 86-92 %; streaming 96
and 99 %, staged DeepSpeed 107 % (R). More than all of it is the probe's error: it tries the drive for seconds only."""
OVERLAP_RESIDUE = 0.14
"""Share of the second longest term that adds to the longest although they overlap. Fitted to six runs of the prototype,
states in RAM (16,384 and 4,096 tokens, fp32 and compact, with and without clipping); worst error of the fit 16 %."""

DEEPSPEED_OPTIMIZER_DRAM_BYTES = 104
"""180 GB/s x 1.21 B parameters / 2.1e9: DeepSpeed's optimizer phase with states in RAM, gradients' copies and clipping
included. Measured: 0.99 s a step with one micro-batch and 1.87 s with four leave 0.70 s, i.e. 1.73 Gparam/s."""
DEEPSPEED_HOST_LAYERS = 4.85
"""Python hooks of ZeRO-3 per layer and micro-batch (forward, recomputation, backward), in HOST_LAYER_S: 20.4 ms with
0.4 B parameters beside 4.0 ms (T), 20.2 ms with 0.4 B and 20.4 with 1.2 B beside 3.8-5.1 ms (H); (S) 25.6. With fixed
segments instead of growing ones 18.0 ms (H), 17.1-19.3 (R). It hides under a slower GPU's compute."""
DEEPSPEED_PLAIN_HOST_LAYERS = 1.5
"""Host's time below ZeRO-3: Python and launches of an eager layer. Measured with 0.1 B parameters, stage none, 12
layers
and 2 micro-batches: 6.7 ms beside 4.0 ms (T), 5.4-6.4 ms (H); 4.7-5.3 with fixed segments, which take 0.9 GB more."""
DEEPSPEED_GPU_UPDATE_HOST_LAYERS = 0.53
"""Python and launches of an update on the GPU. Measured in those runs, 12 layers: 0.028 s (T), 0.023-0.030 s (H)."""
DEEPSPEED_OVERHEAD_BYTES = int(2.5 * GIB)
"""Interpreter, torch, CUDA and DeepSpeed, nothing offloaded. Measured, resident: 2.5-2.6 GB (R, S, T), 2.9 (H)."""
DEEPSPEED_STAGED_OVERHEAD_BYTES = int(2.6 * GIB)
"""Interpreter, torch, CUDA and DeepSpeed with the staged offload. Measured, resident memory less homes and staging:
2.6-3.0 GB in three runs (R), 2.7-2.9 (S), 2.6-2.8 (T). The engine itself leaves 3 GiB of a budget for them."""
DEEPSPEED_NORM_NUMEL = 250_000_000
"""Elements of an offloaded gradient that DeepSpeed's own offload has in fp64 at a time, on the GPU, for its norm
(`_constant_buffered_norm2` in runtime/zero/stage3.py). llama-1b with micro-batches of 4 and 8 rows of 1,024, measured:
3.747 and 3.744 GB of tensors, which is these 2 GB, three times its tied embedding, and a bucket, to 2 %."""

# --- drive

RATED_WRITES_PER_BYTE = 600
"""Bytes a consumer NVMe drive is rated to take per byte of capacity (600 TB per TB; a 4 TB drive: 2.4 PB)."""

# --- nominal rates, used only when asked for

UNIFIED_VRAM_SHARE, UNIFIED_RAM_SHARE_OF_ANSWERS = 0.25, 0.125
"""Shares of a memory that GPU and CPU have in common: the GPU's in training, whose weights and states are at home in
RAM, and the rest beside a model that answers. Chosen, not measured."""
NOMINAL_PCIE_SHARE = 0.8
"""Usable of a PCIe link's line rate for copies: 12-13 of 15.75 GB/s at 4.0 x8."""
NOMINAL_DRIVE_READ_SHARE, NOMINAL_DRIVE_WRITE_SHARE = 0.83, 0.70
"""Data sheets of PCIe 4.0 x4 NVMe drives: 6-7 GB/s read, 5-6 written, of 7.88."""
NOMINAL_DRIVE_GB_PER_S: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"ssd": (0.55, 0.5), "hdd": (0.2, 0.2), "nvme": (3.0, 2.0)}
)
"""(read, write) by kind where the drive's link is not known: SATA 3, a disk, an NVMe drive on PCIe 3.0 x4."""
NOMINAL_CPU_TFLOPS_PER_CORE = 0.04
"""fp32 matrix products of a core with AVX2 at 3 GHz: 96 GFLOPS of peak, less than half of it with all cores at work."""
NOMINAL_RAM_GB_PER_S = 40.0
"""Dual-channel DDR4-3200: 51.2 GB/s by data sheet, about 0.78 of it by triad."""
