"""The aio block of the resolved configuration: DeepSpeed's drive transfers.

Every transfer goes past the page cache, and DeepSpeed never looks at its result: sizes that are no whole sectors must
be refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outcore.engine.deepspeed.config import keys
from outcore.engine.deepspeed.notes import Notes
from outcore.engine.deepspeed.settings import DeepSpeedSettings


def aio_section(user: Mapping[str, Any], settings: DeepSpeedSettings, notes: Notes) -> dict[str, Any]:
    """The aio block: flags over file over DeepSpeed's defaults."""
    in_file = user.get("aio")
    block = keys.check_block("aio", in_file, keys.AIO, keys.AIO_IGNORED)
    if isinstance(in_file, Mapping) and "thread_count" in in_file:
        notes.dropped("aio.thread_count", "DeepSpeed 0.19.8 ignores it; the key is intra_op_parallelism")
    aio = {
        "block_size": flag_or_file(settings, "aio_block_size", block.get("block_size"), "aio.block_size", notes),
        "queue_depth": flag_or_file(settings, "aio_queue_depth", block.get("queue_depth"), "aio.queue_depth", notes),
        "intra_op_parallelism": block.get("intra_op_parallelism", 1),
        "single_submit": block.get("single_submit", False),
        "overlap_events": block.get("overlap_events", True),
        "use_gds": block.get("use_gds", False),
    }
    for key in ("block_size", "queue_depth", "intra_op_parallelism"):
        value = aio[key]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"deepspeed_config.json: aio.{key} must be a whole number above 0, got {value!r}.")
    for key in ("single_submit", "overlap_events", "use_gds"):
        if not isinstance(aio[key], bool):
            raise ValueError(f"deepspeed_config.json: aio.{key} must be true or false, got {aio[key]!r}.")
    if aio["block_size"] % 4096:
        raise ValueError(
            f"deepspeed_config.json: aio.block_size {aio['block_size']} is not a multiple of 4096 bytes; direct "
            "transfers "
            "of part of a sector fail, and DeepSpeed does not notice. Use a power of two such as 1048576."
        )
    if aio["intra_op_parallelism"] & (aio["intra_op_parallelism"] - 1):
        raise ValueError(
            f"deepspeed_config.json: aio.intra_op_parallelism {aio['intra_op_parallelism']} is not a power of two; "
            "DeepSpeed's sizes would not divide into whole sectors. Use 1, 2, 4 or 8."
        )
    if aio["use_gds"]:
        raise ValueError(
            "deepspeed_config.json: aio.use_gds needs GPUDirect Storage, which outcore uses only where "
            "gds_optimizer.py has "
            "proved a direct path, and not through DeepSpeed. Set it to false."
        )
    return aio


def flag_or_file(settings: DeepSpeedSettings, flag: str, in_file: Any, key: str, notes: Notes) -> Any:
    """The flag where the user gave it, else the file's value, else the flag's default."""
    value = getattr(settings, flag)
    if in_file is None:
        return value
    if not settings.was_given(flag):
        return in_file
    if in_file != value:
        notes.lines.append(f"{key} = {value}: --{flag} wins over the file's {in_file}")
    return value
