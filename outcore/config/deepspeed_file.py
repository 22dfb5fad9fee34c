"""deepspeed_config.json: its keys checked, in DeepSpeed's current spelling, and the fields of the table that it gives.

Everything that can be wrong with the file by itself is told here, in words, before the model is known: misspelt keys
(which DeepSpeed would ignore), what DeepSpeed 0.19.8 removed or outcore cannot drive, values of a wrong type or range.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outcore.config import deepspeed_keys as keys
from outcore.config.convert import ConfigError, nearest
from outcore.config.fields import FIELDS
from outcore.config.spec import Field

NAME = "deepspeed_config.json"
SHORT_ZERO = (
    "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance", "param_persistence_threshold",
    "model_persistence_threshold", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "allgather_sequential",
)  # fmt: skip
"""Keys that DeepSpeed also knows without stage3_ in front."""


@dataclass(frozen=True)
class DeepSpeedFile:
    """The file as it was understood."""

    blocks: Mapping[str, Any] = field(default_factory=dict)
    """The whole of it: without "auto", comments and old spellings."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the table that it gives, converted, by name."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Field -> the dotted key that gave it."""
    path: str = NAME

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value under a dotted key; `default` where there is none."""
        value = value_at(self.blocks, dotted)
        return default if value is None else value


SHIPPED = next(
    (path for path in (Path(__file__).with_name(NAME), Path(__file__).resolve().parents[2] / NAME) if path.is_file()),
    Path(NAME),
)
"""The defaults that outcore brings: beside this file in a wheel, at the root of a clone."""


def read_deepspeed_file(path: str | Path) -> DeepSpeedFile:
    """The user's file. ConfigError with file, line and reason when it is not usable."""
    file = Path(path).expanduser()
    if not file.is_file() and str(path) == SHIPPED.name and SHIPPED.is_file():
        file = SHIPPED  # started from any folder
    if not file.is_file():
        raise ConfigError(f"--deepspeed_config {path}: no such file. Leave the flag out to take outcore's own.")
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=_no_key_twice)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object with DeepSpeed's settings, got {type(config).__name__}.")
    return understand(config, str(path))


def understand(config: object, path: str = NAME) -> DeepSpeedFile:
    """A parsed file, which is never changed. ConfigError naming the key that is wrong."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path} must hold a JSON object {{...}}, got {type(config).__name__}.")
    try:
        blocks = _current(config)
        values, found = _fields(blocks)
        return DeepSpeedFile(blocks, values, found, path)
    except ValueError as error:
        raise ConfigError(str(error).replace(NAME, path, 1)) from error


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ConfigError for a key that comes twice, of which readers silently take the last."""
    block = dict(pairs)
    if len(block) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"the key {twice!r} is given twice in one block. Keep one of them.")
    return block


def value_at(blocks: Mapping[str, Any], dotted: str) -> Any:
    """The value under a dotted key, a number being a place in a list; None where there is none."""
    value: Any = blocks
    for key in dotted.split("."):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list | tuple) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _current(config: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks, checked and in today's spelling. ValueError naming the key."""
    keys.check_top_level(config)
    blocks: dict[str, Any] = _without_auto(copy.deepcopy(dict(config)))
    if "bf16" in blocks and "bfloat16" in blocks:
        raise ValueError(f"{NAME}: bf16 and bfloat16 are the same block; keep bf16.")
    if "bfloat16" in blocks:
        blocks["bf16"] = blocks.pop("bfloat16")
    for name, known in (("bf16", keys.BF16), ("fp16", keys.FP16), ("data_types", keys.DATA_TYPES)):
        if name in blocks:
            blocks[name] = keys.check_block(name, blocks[name], known)
            if not isinstance(blocks[name].get("enabled", False), bool):
                raise ValueError(f"{NAME}: {name}.enabled must be true or false, got {blocks[name]['enabled']!r}.")
    if value_at(blocks, "bf16.enabled") and value_at(blocks, "fp16.enabled"):
        raise ValueError(f"{NAME}: bf16.enabled and fp16.enabled contradict each other; enable one of them.")
    if "outcore" in blocks:
        blocks["outcore"] = keys.check_block("outcore", blocks["outcore"], keys.OUTCORE, keys.OUTCORE_IGNORED)
        if "lanes" in blocks["outcore"]:
            known = frozenset({"slot_bytes", "num_slots"})
            blocks["outcore"]["lanes"] = keys.check_block("outcore.lanes", blocks["outcore"]["lanes"], known)
    if "zero_optimization" in blocks:
        blocks["zero_optimization"] = _zero(blocks["zero_optimization"])
    if "optimizer" in blocks:
        blocks["optimizer"] = _optimizer(blocks["optimizer"])
    if "scheduler" in blocks:
        # Which of its values may stand beside the run's own is asked when the run's length is known.
        blocks["scheduler"] = keys.check_block("scheduler", blocks["scheduler"], frozenset({"type", "params"}))
        kind, known = blocks["scheduler"].get("type"), keys.SCHEDULERS
        words = f"scheduler.type {kind!r} is not one of {', '.join(known)}.{nearest(str(kind), known)}"
        _need(kind in (None, *known), words)
    if "aio" in blocks:
        _check_aio(keys.check_block("aio", blocks["aio"], keys.AIO, keys.AIO_IGNORED))
    _check_rest(blocks)
    return blocks


def _without_auto(block: dict[str, Any]) -> dict[str, Any]:
    """Without the entries whose value is "auto" (Hugging Face's placeholder), without comments."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in block.items()
        if not (isinstance(value, str) and value == "auto") and not keys.is_comment(key)
    }


def _zero(block: Any) -> dict[str, Any]:
    """The block zero_optimization in DeepSpeed's current spelling."""
    if isinstance(block, bool):
        block = {"stage": int(block)}
    if isinstance(block, Mapping):
        for key, feature in keys.REMOVED_ZERO.items():
            if key in block:
                raise ValueError(f"{NAME}: zero_optimization.{key} was removed from DeepSpeed ({feature}). Delete it.")
    zero = keys.check_block("zero_optimization", block, keys.ZERO)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.pop(old, None) and new not in zero:
            zero[new] = {"device": "cpu"}
    zero.pop("cpu_offload_use_pin_memory", None)
    for short in SHORT_ZERO:
        if short in zero:
            zero.setdefault(f"stage3_{short}", zero[short])
            del zero[short]
    if "stage3_gather_fp16_weights_on_model_save" in zero:
        old = zero.pop("stage3_gather_fp16_weights_on_model_save")
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", old)
    for key, known in (("offload_param", keys.OFFLOAD_PARAM), ("offload_optimizer", keys.OFFLOAD_OPTIMIZER)):
        if key in zero:
            zero[key] = keys.check_block(f"zero_optimization.{key}", zero[key], known)
            if zero[key].get("device") is None:
                zero[key]["device"] = "none"  # DeepSpeed's default
            if not isinstance(zero[key].get("pin_memory", True), bool):
                pin = zero[key]["pin_memory"]
                raise ValueError(f"{NAME}: zero_optimization.{key}.pin_memory must be true or false, got {pin!r}.")
    stage = zero.get("stage")
    if stage is not None and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        raise ValueError(f"{NAME}: zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r}.")
    number = value_at(zero, "offload_param.max_in_cpu")
    if number is not None and (isinstance(number, bool) or not isinstance(number, int | float) or number < 0):
        raise ValueError(
            f"{NAME}: zero_optimization.offload_param.max_in_cpu must be a number of elements, got {number!r}."
        )
    return zero


def _need(is_right: bool, words: str) -> None:
    if not is_right:
        raise ValueError(f"{NAME}: {words}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _optimizer(block: Any) -> dict[str, Any]:
    """The block optimizer; what outcore does not train with is refused."""
    block = keys.check_block("optimizer", block, frozenset({"type", "params", "legacy_fusion"}))
    kind = block.get("type", "AdamW")
    is_known = isinstance(kind, str) and kind.lower() in ("adam", "adamw")
    _need(is_known, f"optimizer.type {kind!r} is not supported; outcore trains with AdamW (or Adam).")
    _need(
        "max_grad_norm" not in (block.get("params") or {}),
        "optimizer.params.max_grad_norm is refused by DeepSpeed; write gradient_clipping at the top level instead.",
    )
    params = keys.check_block("optimizer.params", block.get("params"), keys.ADAM)
    contradicts = kind.lower() == "adamw" and params.get("adam_w_mode") is False
    _need(not contradicts, "optimizer.type AdamW contradicts adam_w_mode false; use type Adam.")
    amsgrad = params.pop("amsgrad", False)
    _need(not amsgrad, "optimizer.params.amsgrad is not supported by DeepSpeed's Adam; remove it.")
    betas = params.get("betas", [0.9, 0.999])
    are_two = isinstance(betas, list | tuple) and len(betas) == 2
    _need(are_two, f"optimizer.params.betas must be two numbers, got {betas!r}.")
    return {**block, "params": params} if params or "params" in block else block


def _check_aio(aio: Mapping[str, Any]) -> None:
    """Every transfer of DeepSpeed's goes past the page cache, and it never looks at the result: sizes that are no whole
    sectors must be refused."""
    parallel = aio.get("intra_op_parallelism", 1)
    _need(_is_whole(parallel), f"aio.intra_op_parallelism must be a whole number above 0, got {parallel!r}.")
    _need(
        not parallel & (parallel - 1),
        f"aio.intra_op_parallelism {parallel} is not a power of two; DeepSpeed's sizes would not divide into whole "
        "sectors. Use 1, 2, 4 or 8.",
    )
    for key in ("single_submit", "overlap_events", "use_gds"):
        _need(isinstance(aio.get(key, False), bool), f"aio.{key} must be true or false, got {aio.get(key)!r}.")
    _need(
        not aio.get("use_gds"),
        "aio.use_gds needs GPUDirect Storage, which outcore uses only where the probe has proved a direct path, "
        "and not through DeepSpeed. Set it to false.",
    )


def _check_rest(blocks: Mapping[str, Any]) -> None:
    """Keys at the top level that outcore's loop cannot drive."""
    for block, key in (("torch_autocast", "enabled"), ("compile", "deepcompile")):
        value = blocks.get(block) or {}
        _need(isinstance(value, Mapping), f"{block!r} must be a JSON object {{...}}, got {value!r}.")
        _need(not value.get(key), f"{block}.{key} is not supported here. Set it to false, or delete the block.")
    for key, only, words in (
        ("gradient_allreduce_op", "mean", "must be mean: outcore averages the loss over all tokens itself."),
        ("managed_gradient_accumulation", True, "false is not supported here. Delete it."),
        ("sequence_parallel_size", 1, "must be 1: outcore's DeepSpeed engine is data parallel."),
    ):
        _need(blocks.get(key, only) == only, f"{key} {words}")
    kind, total = blocks.get("communication_data_type", "fp32"), blocks.get("train_batch_size")
    _need(kind in ("fp32", "fp16", "bf16"), f"communication_data_type must be fp32, fp16 or bf16, got {kind!r}.")
    _need(total is None or _is_whole(total), f"train_batch_size must be a whole number of 1 or more, got {total!r}.")


def _fields(blocks: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(values of the table's fields, the keys that gave them)."""
    values: dict[str, Any] = {}
    found: dict[str, str] = {}
    for name, row in FIELDS.items():
        given = [(key, value) for key in row.spec.file if (value := value_at(blocks, key)) not in (None, "")]
        if row.is_switch and any(value is not given[0][1] for _, value in given[1:]):
            given = [pair for pair in given if pair[1] is True]  # yes where any of the blocks says so
        elif row.is_switch and len(given) < len(row.spec.file) and given and given[0][1] is False:
            given = []  # no only where all of them do
        for key, value in given[:1]:
            values[name], found[name] = _typed(row, key, value), key
    return values, found


def _typed(row: Field, key: str, value: Any) -> Any:
    """A value of JSON as the field's type; ValueError naming the key and the field."""
    where, kind = f"{NAME}: {key} ({row.name})", row.kind
    if row.choices:
        text = ("true" if value else "false") if isinstance(value, bool) else str(value)
        on_off = {"true": "on", "false": "off"}.get(text, text)
        text = row.spec.file_words.get(text) or row.spec.words.get(text, on_off)
        if text not in row.choices:
            known = (*(word for word in row.spec.words if word not in row.choices), *row.choices)
            raise ValueError(f"{where} must be one of {', '.join(known)}, got {value!r}.{nearest(text, known)}")
        return text
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{where} must be true or false, got {value!r}.")
        return value
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{where} must be a text, got {value!r}.")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and value != int(value)):
        raise ValueError(f"{where} must be a {'whole ' if kind is int else ''}number, got {value!r}.")
    number = kind(value) if row.spec.file_unit == 1.0 else kind(value * row.spec.file_unit)
    if allowed := row.range_problem(number):
        raise ValueError(f"{where} must be {allowed}, got {value!r}.")
    return number
