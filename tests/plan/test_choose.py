"""What the planner recommends: every size on the reference laptop, reasons, smallest changes, advice."""

from __future__ import annotations

import dataclasses

import pytest

from outcore.common.quantities import GIB
from outcore.model import preset_shape
from outcore.plan.answer.advice import advise, shortage_words
from outcore.plan.choose import batches, choose, choose_or_change, mild_changes, smaller_micro_batches
from outcore.plan.profile import RunRequest, load_hardware
from tests.docs.planning import family_shape, largest_models
from tests.plan.fakes import server

LAPTOP = load_hardware("rtx4070-laptop")
SIZES = ("llama-1b", "llama-3b", "llama-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "llama-70b")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("lora_r", [0, 16])
def test_every_size_fits_or_says_the_smallest_change(name, lora_r):
    shape = preset_shape(name)
    answer = choose_or_change(shape.with_lora(lora_r) if lora_r else shape, RunRequest(), LAPTOP)
    plan = answer.plan if answer.plan.fits else answer.smallest_change and answer.smallest_change.plan
    assert plan and plan.fits
    assert plan.used_bytes("vram") <= LAPTOP.vram_bytes
    assert plan.tier("ram").used_bytes <= LAPTOP.ram_bytes
    assert plan.tokens_per_step == 8192
    assert set(answer.stages) == {"none", "zero1", "zero2", "zero3", "infinity"}


def test_you_do_not_need_infinity():
    tiny = choose(preset_shape("tiny"), RunRequest(), LAPTOP)
    assert tiny.plan.engine == "stream" and "do not need Infinity" in tiny.reason  # as train_model.py does, and advice
    assert tiny.stages["none"].fits
    one = choose(preset_shape("llama-1b"), RunRequest(), LAPTOP)
    assert "do not need Infinity" in one.reason and "zero1 with the optimizer in RAM" in one.reason
    assert "Infinity" not in choose(preset_shape("llama-8b"), RunRequest(), LAPTOP).reason
    big_gpu = choose(preset_shape("llama-3b"), RunRequest(), server())
    assert big_gpu.plan.engine == "stream" and "without any ZeRO" in big_gpu.reason
    asked = choose(preset_shape("llama-3b"), RunRequest(zero_stage="none"), server())
    assert asked.plan.zero_stage == "none" and asked.plan.homes["parameters"] == "VRAM"


def test_explicit_choices_are_kept():
    shape = preset_shape("llama-1b")
    infinity = choose(shape, RunRequest(engine="deepspeed", zero_stage="infinity"), LAPTOP)
    assert (
        infinity.plan.zero_stage == "infinity"
        and infinity.reason == "engine deepspeed and zero_stage infinity as asked."
    )
    assert "--zero_stage infinity" in infinity.plan.flags and "--nvme_offload_path" in infinity.plan.flags
    two = choose(shape, RunRequest(zero_stage="zero2"), LAPTOP).plan
    assert two.engine == "deepspeed" and "--offload_optimizer cpu" in two.flags and "--offload_params" not in two.flags
    three = choose(shape, RunRequest(engine="deepspeed", zero_stage="zero3"), LAPTOP).plan
    assert "--offload_params" in three.flags
    auto = choose(shape, RunRequest(zero_stage="infinity"), LAPTOP).plan
    assert auto.engine == "stream"  # as train_model.py does with engine auto
    fixed = choose(shape, RunRequest(micro_batch=3, accumulation=5), LAPTOP).plan
    assert (fixed.micro_batch, fixed.accumulation) == (3, 5)


def test_open_batches_keep_the_global_batch():
    assert batches(RunRequest()) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert batches(RunRequest(micro_batch=3)) == [(3, 3)]
    assert {a for _, a in batches(RunRequest(accumulation=7))} == {7}


def test_what_the_streaming_engine_refuses():
    with pytest.raises(ValueError, match="encoder-decoder"):
        choose(preset_shape("t5-small"), RunRequest(engine="stream"), LAPTOP)
    t5 = choose(preset_shape("t5-small"), RunRequest(), LAPTOP)
    assert t5.stream is None and t5.plan.engine == "deepspeed"


def test_contradictions_are_refused():
    for settings, words in (
        ({"seq_length": 0}, "must be above 0"),
        ({"engine": "magic"}, "engine: 'magic' is not one of"),
        ({"zero_stage": "four"}, "is not one of"),
        ({"state_format": "split", "precision": "fp16"}, "needs --precision bf16"),
        ({"state_format": "tiny"}, "is not one of"),
        ({"max_grad_norm": -1.0}, "must be at least 0"),
        ({"engine": "stream", "zero_stage": "zero2"}, "contradict"),
    ):
        with pytest.raises(ValueError, match=words):
            RunRequest(**settings)
    with pytest.raises(ValueError, match="knows 1024 positions"):
        choose(preset_shape("gpt2"), RunRequest(seq_length=4096), LAPTOP)


def test_long_sequences_name_the_tier_and_the_shorter_row():
    request = RunRequest(seq_length=131072, engine="stream")
    answer = choose_or_change(preset_shape("llama-8b"), request, LAPTOP)
    assert not answer.plan.fits
    words = shortage_words(answer.plan)
    assert "VRAM" in words and "RAM: 288.72 GiB needed" in words and "most of it rows that the device has" in words
    assert "short" in advise(preset_shape("llama-8b"), request, LAPTOP, answer.plan).words()
    small = dataclasses.replace(request, seq_length=65536)
    change = choose_or_change(preset_shape("llama-8b"), small, LAPTOP).smallest_change
    assert change and change.words.startswith("shorter rows: --seq_length") and change.plan.seq_length < 65536


def test_small_ram_without_a_drive_takes_the_mildest_change():
    hardware = dataclasses.replace(LAPTOP, nvme_free_bytes=0, ram_bytes=30 * GIB)
    request = RunRequest(engine="stream", checkpoints_elsewhere=True)
    change = choose_or_change(preset_shape("llama-3b"), request, hardware).smallest_change
    assert change and "8-bit moments" in change.words and change.plan.state_format == "split8"
    less = dataclasses.replace(hardware, ram_bytes=14 * GIB)
    change = choose_or_change(preset_shape("llama-3b"), request, less).smallest_change
    assert change and "--lora_r 16" in change.words and change.plan.lora_r == 16


def test_nothing_helps():
    hopeless = dataclasses.replace(LAPTOP, vram_bytes=GIB)
    answer = choose_or_change(preset_shape("llama-8b"), RunRequest(), hopeless)
    assert not answer.plan.fits and answer.smallest_change is None


def test_changes_go_from_mild_to_harsh():
    words = [w for w, _, _ in mild_changes(preset_shape("llama-8b"), RunRequest(micro_batch=4, seq_length=512))]
    order = (
        "save_total_limit", "checkpoint_dir", "per_device", "split8", "max_grad_norm", "seq_length 256", "lora_r",
        "llama-3b",
    )  # fmt: skip
    places = [next(i for i, w in enumerate(words) if key in w) for key in order]
    assert places == sorted(places)
    with_adapters = [w for w, _, _ in mild_changes(preset_shape("llama-8b").with_lora(8), RunRequest())]
    assert not any("lora" in w for w in with_adapters)


def test_advice_on_a_drive_bound_run():
    shape, request = preset_shape("llama-8b"), RunRequest()
    plan = choose(shape, request, LAPTOP).plan
    advice = advise(shape, request, LAPTOP, plan)
    assert advice.constraint.startswith("the drive") and advice.change and advice.gain > 1.5
    assert "One change that helps most" in advice.words()


def test_fewer_rows_are_advised_where_layers_would_go_in_tiles():
    request = RunRequest(seq_length=1024, micro_batch=4, accumulation=4, engine="stream")
    hardware = dataclasses.replace(LAPTOP, ram_bytes=52 * GIB, vram_bytes=13 * GIB // 2)
    shape = preset_shape("llama-70b").with_lora(16)
    plan = choose(shape, request, hardware).plan
    assert any("all layers computed in tiles" in note for note in plan.notes)
    advice = advise(shape, request, hardware, plan)
    assert advice.change and "--per_device_train_batch_size 2 --gradient_accumulation_steps 8" in advice.change
    better = choose(shape, dataclasses.replace(request, micro_batch=2, accumulation=8), hardware).plan
    assert advice.gain == better.tokens_per_s / plan.tokens_per_s > 1.1
    assert not any("layers computed in tiles" in note for note in better.notes)


def test_the_batch_stays_where_fewer_rows_make_a_run_fit():
    hardware = dataclasses.replace(LAPTOP, ram_bytes=52 * GIB)
    shape = preset_shape("qwen3-32b").with_lora(16)
    for accumulation, more in ((1, " --gradient_accumulation_steps"), (None, "")):
        request = RunRequest(seq_length=2048, micro_batch=36, accumulation=accumulation, engine="stream")
        change = choose_or_change(shape, request, hardware).smallest_change
        assert change and f"--per_device_train_batch_size {change.plan.micro_batch}{more}" in change.words
        assert change.plan.micro_batch > 1 and (more == "" or change.plan.micro_batch * change.plan.accumulation == 36)
    assert list(smaller_micro_batches(12)) == [(6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]
    assert list(smaller_micro_batches(1)) == []


def test_advice_for_deepspeed_is_the_other_engine():
    shape, request = preset_shape("llama-3b"), RunRequest(engine="deepspeed")
    plan = choose(shape, request, LAPTOP).plan
    advice = advise(shape, request, LAPTOP, plan)
    assert advice.change and ("stream" in advice.change or "batch" in advice.change or "RAM" in advice.change)


def test_wear_by_hand():
    plan = choose(preset_shape("llama-8b"), RunRequest(), LAPTOP).plan
    steps = 4e12 * 600 / plan.drive_written_bytes_per_step
    assert plan.drive_life_steps == pytest.approx(steps)
    assert plan.drive_life_days == pytest.approx(steps * plan.time.step_s / 86400)
    assert plan.written_bytes_per_day == pytest.approx(plan.drive_written_bytes_per_step * 86400 / plan.time.step_s)


@pytest.mark.more
def test_largest_models_fit_and_the_next_size_does_not():
    rows = {row.kind: row.plan for row in largest_models(LAPTOP)}
    assert all(plan is not None and plan.fits for plan in rows.values())
    none = rows["GPU only (stage none)"]
    assert none is not None
    width = int(none.model.removeprefix("llama-h"))
    request = RunRequest(engine="deepspeed", zero_stage="none", checkpoints_elsewhere=True)
    assert not choose(family_shape(width + 256), request, LAPTOP).plan.fits
    ram = rows["stream, RAM only, lossless"]
    compact = rows["stream, RAM only, 8-bit moments"]
    assert ram is not None and compact is not None and ram.params < compact.params and not compact.uses_drive
    nothing = largest_models(dataclasses.replace(LAPTOP, vram_bytes=GIB))
    assert all(row.plan is None for row in nothing)
