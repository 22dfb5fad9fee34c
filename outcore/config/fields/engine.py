"""Engine and offload: fields of the settings; each docstring is the text of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.config.spec import setting

ZeroStage = Literal["none", "zero1", "zero2", "zero3", "infinity"]
StateFormat = Literal["auto", "fp32", "split", "fp32_m8", "split8", "fp24_m8"]
STAGE_WORDS = {"0": "none", "1": "zero1", "2": "zero2", "3": "zero3", "false": "none", "true": "zero1"}
NVME_PATHS = (
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    "outcore.nvme_path",
)


@dataclass(frozen=True)
class EngineFields:
    """Engine and offload."""

    engine: Literal["auto", "stream", "deepspeed"] | None = setting(None, file=("outcore.engine",), common=True)
    """Who moves the bytes: auto streams a decoder-only model on one process and says why where it does not.
    Default: deepspeed_config.json's outcore block (auto)."""
    state_format: StateFormat = setting("auto", file=("outcore.state_format",), common=True)
    """Offloaded optimizer states, with either engine: as fp32, or split (bf16 only: the same numbers in 10 B a
    parameter instead of 12), or with 8-bit moments as fp32_m8 or split8 (other numerics), or with a master of 24 bits
    beside those, too, as fp24_m8 (bf16 only). auto: split with bf16, else fp32."""
    ram_budget_gib: float | None = setting(None, file=("outcore.ram_budget_gib",), least=0, common=True)
    """GiB of RAM for parameters, gradients and optimizer states; what does not fit goes to the NVMe path. Default: what
    is available now, less 3 GiB (DeepSpeed's engine: 2 GiB, and it counts the whole process)."""
    activations: Literal["auto", "device", "ram", "nvme"] = "auto"
    """Engine stream: where activation checkpoints wait for their backward; auto: in RAM beside a GPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Engine stream: layers through torch.compile; auto: on a GPU, where the model allows it."""
    tiling: Literal["auto", "on", "off"] = "auto"
    """Engine stream: layers and heads computed in tiles; auto: those that do not fit on the GPU whole."""
    tile_bytes: int | None = setting(None, above=0)
    """Engine stream: bytes of one tile of a weight. Default: up to 64 MiB, by the GPU's memory."""
    deepspeed_config: str = setting("deepspeed_config.json", common=True)
    """The DeepSpeed configuration file."""
    zero_stage: ZeroStage | None = setting(None, file=("zero_optimization.stage",), words=STAGE_WORDS, common=True)
    """none, zero1, zero2, zero3 or infinity (0/1/2/3 accepted). Default: deepspeed_config.json's (3)."""
    nvme_offload_path: str | None = setting(None, file=NVME_PATHS, common=True)
    """Folder on an NVMe drive for what RAM does not hold."""
    nvme_offload_optimizer: bool = True
    """With infinity: optimizer states on NVMe."""
    nvme_offload_params: bool = True
    """With infinity: parameters on NVMe."""
    nvme_offload_gradients: bool = setting(False, file=("outcore.nvme_offload_gradients",))
    """DeepSpeed with the optimizer on NVMe: gradients on NVMe too. Slower; saves 2 B of RAM per parameter."""
    offload_optimizer: Literal["auto", "none", "cpu", "nvme"] = setting(
        "auto", file=("zero_optimization.offload_optimizer.device",)
    )
    """Where optimizer states live below infinity; auto: deepspeed_config.json's, RAM for zero3."""
    offload_params: Literal["auto", "none", "cpu", "nvme"] = setting(
        "auto", file=("zero_optimization.offload_param.device",)
    )
    """Where parameters live below infinity; auto: deepspeed_config.json's, RAM for zero3."""
    aio_block_size: int = setting(1048576, file=("aio.block_size",), above=0, most=1 << 30, usual="1048576 to 16777216")
    """DeepSpeed's own NVMe offload: bytes per drive request."""
    aio_queue_depth: int = setting(8, file=("aio.queue_depth",), above=0, most=4096)
    """DeepSpeed's own NVMe offload: drive requests in flight."""
    pin_memory: bool = setting(
        True, file=("zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory")
    )
    """Pinned staging buffers."""
    max_in_cpu_gb: float = setting(1.0, least=0)
    """DeepSpeed with parameters on NVMe: GB of them kept in RAM."""
    strict_offload: bool = False
    """An unusable NVMe path is an error; otherwise the run falls back to RAM and says so."""
    local_rank: int = -1
    """Set by the deepspeed launcher."""
