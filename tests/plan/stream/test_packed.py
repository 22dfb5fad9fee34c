"""Packed bases in the planner: their bytes are the formats' own, and packing is proposed where it saves something."""

import dataclasses
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from outcore.config import ConfigError
from outcore.formats import QUANTIZE_CHOICES, packed_format
from outcore.model import preset_shape, resolve_shape, shape_from_config
from outcore.model.presets import preset_config
from outcore.plan.answer.advice import packed_words
from outcore.plan.choose import choose, choose_or_change
from outcore.plan.fields import parse_plan
from outcore.plan.inference import changes, plan_inference
from outcore.plan.profile import RunRequest, load_hardware
from outcore.sizing.states import QUANTIZED, packed_size

FORMATS = ("nf4", "int8", "mxfp4", "q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k", "fp8_128", "fp8_64", "int8_64")
FORMATS += ("int4_128_fp16_zero", "int4_32_bf16", "int4_64_fp32")
LAPTOP = load_hardware("rtx4070-laptop")
REQUEST = RunRequest(engine="stream")


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_those_of_the_formats(name: str) -> None:
    size, real = packed_size(name), packed_format(name)
    assert size.block == real.block
    assert size.block_bytes == sum(plane.block_bytes for plane in real.planes)
    assert set(QUANTIZED) == set(QUANTIZE_CHOICES)


def test_a_base_in_a_published_format_is_counted() -> None:
    """A GGUF file's types, too: planning adapters over one died of a KeyError."""
    sizes = [preset_shape("llama-1b").with_lora(8).packed(name).saved_bytes(2) for name in ("q4_0", "q5_k", "q8_0")]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0


@pytest.mark.parametrize("quantize", QUANTIZE_CHOICES)
@pytest.mark.parametrize("preset", ["llama-1b", "gpt2", "qwen3-30b-a3b"])
def test_a_preset_counted_by_hand_saves_what_its_configuration_says(preset: str, quantize: str) -> None:
    config: Any = preset_config(preset)
    if preset == "qwen3-30b-a3b":
        config.num_hidden_layers = 2
    counted = shape_from_config(preset, config).packed(quantize).saved_bytes(2)
    by_hand = preset_shape(preset).packed(quantize)
    assert by_hand.layer_saved_bytes(2) * config.num_hidden_layers == counted


def test_a_packed_base_of_70b_needs_no_drive_and_is_proposed() -> None:
    shape = preset_shape("llama-70b").with_lora(16)
    plain = choose(shape, REQUEST, LAPTOP).plan
    packed = choose(shape.packed("nf4"), REQUEST, LAPTOP).plan
    assert plain.drive_read_bytes_per_step > 100e9
    assert packed.fits and packed.drive_read_bytes_per_step == 0
    assert packed.time.h2d_s < plain.time.h2d_s / 3
    assert "--quantize nf4" in packed.flags and packed.title.startswith("stream, nf4 base")
    words = packed_words(shape, REQUEST, LAPTOP, plain)
    assert words.startswith("--quantize nf4 keeps the frozen base in RAM: 39.78 GiB instead of 131.42 GiB")
    assert "4.5 bits" in words and words.count(". ") == 0


def test_nothing_is_proposed_where_a_16_bit_base_is_in_ram_or_all_weights_train() -> None:
    small = preset_shape("llama-1b").with_lora(16)
    assert packed_words(small, REQUEST, LAPTOP, choose(small, REQUEST, LAPTOP).plan) == ""
    full = preset_shape("llama-8b")
    assert packed_words(full, REQUEST, LAPTOP, choose(full, REQUEST, LAPTOP).plan) == ""


def test_the_wider_format_is_proposed_where_it_does_as_much() -> None:
    shape = preset_shape("qwen3-32b").with_lora(16)
    assert packed_words(shape, REQUEST, LAPTOP, choose(shape, REQUEST, LAPTOP).plan).startswith("--quantize int8")


def test_what_does_not_fit_is_told_that_it_would_packed() -> None:
    shape = preset_shape("llama-70b").with_lora(16)
    no_drive = dataclasses.replace(LAPTOP, nvme_free_bytes=20 * 10**9)
    answer = choose_or_change(shape, dataclasses.replace(REQUEST, save_total_limit=1, micro_batch=1), no_drive)
    assert not answer.plan.fits and answer.smallest_change is not None
    assert "--quantize nf4" in answer.smallest_change.words


def test_deepspeed_is_refused_and_a_model_that_does_not_pack() -> None:
    shape = preset_shape("llama-1b").with_lora(16).packed("nf4")
    with pytest.raises(ValueError, match="only the streaming engine keeps a packed base"):
        choose(shape, RunRequest(engine="deepspeed"), LAPTOP)
    with pytest.raises(ValueError, match=r"no matrix of .* divides"):
        dataclasses.replace(shape, matrices=((2, (100 * 100, 100)),)).packed("nf4")
    with pytest.raises(ConfigError, match="packs what is frozen"):
        parse_plan(["--model", "llama-1b", "--quantize", "nf4"])


def test_answers_are_planned_packed() -> None:
    shape = resolve_shape("llama-8b")
    plain, packed = plan_inference(shape, LAPTOP), plan_inference(shape, LAPTOP, quantize="nf4")
    assert packed.placement.travelling_bytes < plain.placement.travelling_bytes / 3
    assert packed.tokens_per_s(1, 1024) > 3 * plain.tokens_per_s(1, 1024)
    said = "\n".join(changes(plain, preset="balanced"))
    assert "--quantize nf4" in said and "GiB of weights" in said
    assert "--quantize" not in "\n".join(changes(packed, preset="balanced", quantize="nf4"))
    assert parse_plan(["--infer", "llama-8b", "--quantize", "nf4"]).infer_quantize == "nf4"


def test_training_says_it_before_it_loads(tmp_path: Path) -> None:
    from outcore.plan.run import Forecast, Forecaster

    shape = preset_shape("llama-70b").with_lora(16)
    forecaster = Forecaster.__new__(Forecaster)
    forecaster._known = shape, LAPTOP
    forecast = Forecast(choose(shape, REQUEST, LAPTOP).plan, LAPTOP, asked={"request": asdict(REQUEST)})
    assert forecaster.packed_base(forecast).startswith("--quantize nf4")
    assert forecaster.packed_base(Forecast(None, None)) == ""
