"""Engine and offload: fields of the settings; each docstring is the text of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.common.quantities import GIB
from outcore.config.spec import setting

ZeroStage = Literal["none", "zero1", "zero2", "zero3", "infinity"]
StateFormat = Literal["auto", "fp32", "split", "fp32_m8", "split8", "fp24_m8"]
STAGE_WORDS = {"0": "none", "1": "zero1", "2": "zero2", "3": "zero3"}
NVME_PATHS = (
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    "outcore.nvme_path",
)


@dataclass(frozen=True)
class EngineFields:
    """Engine and offload."""

    engine: Literal["auto", "stream", "deepspeed"] | None = setting(None, file=("outcore.engine",), common=True)
    """Engine that moves the bytes: auto streams a decoder-only model on one host, on any number of its GPUs, and says
    why where it does not. Default: deepspeed_config.json's outcore block (auto)."""
    state_format: StateFormat = setting("auto", file=("outcore.state_format",), common=True)
    """Offloaded optimizer states, with either engine: as fp32, or split (bf16 only: the same numbers in 10 B a
    parameter instead of 12), or with 8-bit moments as fp32_m8 or split8 (other numerics), or with a master of 24 bits
    beside those, too, as fp24_m8 (bf16 only). auto: split with bf16, else fp32."""
    ram_budget_gib: float | None = setting(None, file=("outcore.ram_budget_gib",), least=0, common=True)
    """GiB of RAM for the whole process, 2 to 3 of which Python, CUDA and buffers take on a GPU; of parameters,
    gradients and optimizer states what does not fit goes to the NVMe path. Default: what is available now, less 2 GiB
    for the page cache."""
    staging_gib: float | None = setting(None, file=("outcore.staging_bytes",), file_unit=1 / GIB, above=0)
    """GiB of pinned memory: the lanes' slots, then homes of parameters and gradients as far as it reaches. Default: 8,
    or what the machine lets a process pin."""
    residency: Literal["auto", "ram", "nvme"] | None = setting(None, file=("outcore.residency",))
    """ram: nothing goes to a drive; nvme: all that can go there does; auto (default): what RAM does not hold."""
    write_combined: Literal["auto", "on", "off"] | None = setting(None, file=("outcore.write_combined",))
    """Engine stream: the upload lane's slots in memory that the CPU only writes. Default: auto, on where a
    fresh machine profile measured it no slower."""
    storage_engine: Literal["auto", "posix", "kvikio"] | None = setting(None, file=("outcore.storage.engine",))
    """Backend that moves bytes to and from the NVMe drive, in both engines' own offload; gds_optimizer.py --apply
    writes what it measured fastest. Default: auto, which is posix."""
    storage_threads: int | None = setting(None, file=("outcore.storage.threads",), above=0)
    """Threads of the storage engine. Default: 16, or what gds_optimizer.py --apply found."""
    storage_block_bytes: int | None = setting(None, file=("outcore.storage.block_bytes",), above=0)
    """Bytes that a thread moves at a time, a multiple of 4096. Default: 8 MiB, or what --apply found."""
    transfer_path: Literal["staged", "kvikio", "gds"] | None = setting(None, file=("outcore.transfer_path",))
    """Engine stream: how parameters on the NVMe drive come to the GPU: through pinned slots (staged), or read by kvikio
    into the GPU's memory without (gds: past the CPU, too). Default: staged, or what --apply measured fastest."""
    lane_slots: int | None = setting(None, file=("outcore.lanes.num_slots",), above=0)
    """Engine stream: slots of a transfer lane. Default: 4."""
    lane_slot_bytes: int | None = setting(None, file=("outcore.lanes.slot_bytes",), above=0)
    """Engine stream: bytes of a slot, a multiple of 4096. Default: 16 MiB."""
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = setting(None, file=("data_types.grad_accum_dtype",))
    """Type in which gradients of several micro-batches are added up. Default: fp32 (DeepSpeed's engine: the run's)."""
    activations: Literal["auto", "device", "ram", "nvme"] = setting(
        "auto", file=("activation_checkpointing.cpu_checkpointing",), file_words={"true": "ram", "false": "auto"}
    )
    """Engine stream: where activation checkpoints wait for their backward; auto: in RAM beside a GPU."""
    matmul: Literal["same", "float8_tensorwise", "float8_rowwise", "fp16_accumulation"] = "same"
    """Engine stream: how layers multiply: same, in the run's precision, or with other numerics for speed: bf16 rounded
    to float8 with one scale a matrix or a row (GPUs from Ada and Hopper on), fp16 summed in fp16 (GeForce does it twice
    as fast)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Layers through torch.compile; auto: on a GPU, where the model allows it."""
    tiling: Literal["auto", "on", "off", "tokens"] = "auto"
    """Engine stream: layers and heads computed in tiles; auto: those that do not fit on the GPU whole. tokens: all of a
    layer but its attention in tiles of tokens, as auto does with rows for which nothing else leaves room."""
    tile_bytes: int | None = setting(None, above=0)
    """Engine stream: bytes of one tile of a weight. Default: up to 64 MiB, by the GPU's memory."""
    resident_gib: float | None = setting(None, least=0)
    """Engine stream: of the GPU's idle memory at most this many GiB for layers that stay there with their optimizer
    states, which the GPU then updates; 0: none stays. Default: all of it, where that makes steps shorter."""
    ahead_gib: float | None = setting(None, least=0)
    """Engine stream with clipping: GiB of RAM for optimistic updates. These begin before the global norm is known, put
    their states beside the old ones, up to 12 B a parameter with state_format split, and are undone when the step
    clips. Shorter steps where few clip (docs/residency.md). 0: all updates wait for the norm. Default: half of the RAM
    that a run on a GPU leaves idle, used where steps wait for updates."""
    deepspeed_config: str = setting("deepspeed_config.json", common=True)
    """The DeepSpeed configuration file."""
    zero_stage: ZeroStage | None = setting(None, file=("zero_optimization.stage",), words=STAGE_WORDS, common=True)
    """none, zero1, zero2, zero3 or infinity (0/1/2/3 accepted). Default: deepspeed_config.json's (3)."""
    nvme_offload_path: str | None = setting(None, names=True, file=NVME_PATHS, common=True)
    """Folder on an NVMe drive for what RAM does not hold: up to 9 times the 16-bit model is written there, and half as
    much again must be free. A,B: a drive a rank (one process spreads over both). Windows: not C:, the system's."""
    nvme_offload_optimizer: bool = True
    """With infinity: optimizer states on NVMe: 8 to 12 B a parameter, read and written each step."""
    nvme_offload_params: bool = True
    """With infinity: parameters on NVMe: 2 B a parameter, read twice a step."""
    nvme_offload_gradients: bool | None = setting(None, file=("outcore.nvme_offload_gradients",))
    """DeepSpeed with the optimizer on NVMe: gradients on NVMe too. Slower; saves 2 B of RAM per parameter.
    Default: false."""
    nvme_checksums: Literal["auto", "on", "off", "sampled"] = "auto"
    """Verify what the NVMe drive gives back: on everything, sampled one section in eight; auto: on where a core does
    4 GB/s of checksums."""
    offload_optimizer: Literal["auto", "none", "cpu", "nvme"] = setting(
        "auto", file=("zero_optimization.offload_optimizer.device",)
    )
    """Home of optimizer states below infinity; auto: deepspeed_config.json's, RAM for zero3. cpu: up to 12 B of RAM a
    parameter, and the CPU updates them."""
    offload_params: Literal["auto", "none", "cpu", "nvme"] = setting(
        "auto", file=("zero_optimization.offload_param.device",)
    )
    """Home of parameters below infinity; auto: deepspeed_config.json's, RAM for zero3. cpu: 2 B of RAM a parameter,
    sent to the GPU twice a step."""
    initial_scale_power: int | None = setting(None, file=("fp16.initial_scale_power",), least=0, most=64)
    """fp16: the loss scale begins at 2 to this power. Default: 16."""
    loss_scale_window: int | None = setting(None, file=("fp16.loss_scale_window",), above=0)
    """fp16: steps without overflow after which the scale doubles. Default: 1000."""
    loss_scale_hysteresis: int | None = setting(None, file=("fp16.hysteresis",), above=0)
    """fp16: overflows before the scale is halved. Default: 2."""
    min_loss_scale: float | None = setting(None, file=("fp16.min_loss_scale",), above=0)
    """fp16: the smallest scale. Default: 1."""
    deepspeed_offload: Literal["staged", "stock"] | None = setting(None, file=("outcore.offload",))
    """Engine deepspeed: who moves what is offloaded: outcore (staged, the default), or DeepSpeed, in RAM (stock)."""
    aio_block_size: int | None = setting(
        None, file=("aio.block_size",), above=0, most=1 << 30, usual="1048576 to 16777216"
    )
    """Written for DeepSpeed by itself: bytes per drive request, a multiple of 4096: 524288 for SATA or USB
    SSDs, 1048576 for NVMe, 2097152 also on PCIe 4.0. Default: 1048576."""
    aio_queue_depth: int | None = setting(None, file=("aio.queue_depth",), above=0, most=4096)
    """Written for DeepSpeed by itself: drive requests in flight: 4 for SATA or USB SSDs, 8 to 16 for
    NVMe, 32 for several drives. Default: 8."""
    pin_memory: bool | None = setting(
        None, file=("zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory")
    )
    """Page-locked RAM for what is offloaded; false below 16 GB of RAM, which the system needs itself. Default: true."""
    max_in_cpu_gb: float | None = setting(None, least=0)
    """DeepSpeed with parameters on NVMe: GB of them kept in RAM. Default: 1."""
    strict_offload: bool = False
    """An unusable NVMe path is an error; otherwise the run falls back to RAM and says so."""
    fit_check: Literal["error", "warn"] = "error"
    """A run that by forecast does not fit the machine is refused before anything is loaded; warn: it is tried."""
    local_rank: int = -1
    """Set by the deepspeed launcher."""
