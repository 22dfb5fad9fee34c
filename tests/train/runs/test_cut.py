"""A step's cut left to the planner: which rows a step has, which micro-batch is taken, what a resumed run keeps."""

from dataclasses import replace

import pytest

from outcore.config import ConfigError, DeepSpeedFile, ProcessFacts, resolve, understand
from outcore.engine.stream import StreamSettings
from outcore.model import ModelSettings, preset_shape
from outcore.plan.run import Forecaster
from outcore.sizing.layouts import StreamLayout
from outcore.train.configure import parse_config
from outcore.train.configure.rooms import run_length
from outcore.train.run import main
from tests.plan.fakes import layout_of, server
from tests.train.jobs import corpus, flags, in_the_repository, metrics

fixtures = (corpus, in_the_repository)


def _resolved(argv: str, file: dict | None = None, ranks: int = 1):
    said = parse_config([*argv.split(), "--dataset", "embedded"])
    return resolve(said, understand(file) if file else DeepSpeedFile(), ProcessFacts("bf16", world_size=ranks))


@pytest.mark.parametrize(("argv", "file", "ranks", "cut"), [
    ("--micro_batch_size auto", None, 1, (2, 4)),
    ("--micro_batch_size AUTO --gradient_accumulation_steps 8", None, 1, (2, 8)),
    ("--micro_batch_size auto", {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, 1, (3, 5)),
    ("--micro_batch_size auto", {"train_batch_size": 14}, 2, (1, 7)),
    ("--micro_batch_size 2 --gradient_accumulation_steps 8", None, 1, (2, 8)),
])  # fmt: skip
def test_the_rows_of_a_step_until_they_are_cut(argv, file, ranks, cut):
    settings = _resolved(argv, file, ranks)
    assert (settings.per_device_train_batch_size, settings.gradient_accumulation_steps) == cut
    assert settings.cut_is_open == ("auto" in argv.lower())
    for rows in (1, cut[0] * cut[1]):
        other = settings.cut(rows, "why")
        assert other.train_batch_size == settings.train_batch_size and not other.cut_is_open
        assert f"per_device_train_batch_size = {rows}: why" in other.words()


def test_what_auto_cannot_be():
    with pytest.raises(ConfigError, match="expected a whole number or auto, got 'most'"):
        _resolved("--micro_batch_size most")
    with pytest.raises(ConfigError, match="train_batch_size 7 cannot be shared by 2 ranks"):
        _resolved("--micro_batch_size auto", {"train_batch_size": 7}, ranks=2)


@pytest.mark.parametrize(("seq_length", "vram_gib", "expected", "words"), [
    (128, 24, 16, "forecast at"),  # launching many small kernels costs more than they do
    (8192, 24, 2, "forecast at"),  # all that fit are as fast: the usual
    (8192, 2, 1, "none is forecast to fit"),
])  # fmt: skip
def test_larger_micro_batches_where_they_pay_and_the_smallest_where_memory_is_short(
    seq_length, vram_gib, expected, words
):
    hardware, shape = server(vram_bytes=vram_gib << 30), preset_shape("llama-3b").with_lora(8)
    forecaster = Forecaster(ModelSettings(preset="tiny", seq_length=seq_length), None, has_cuda=False)
    forecaster._known = shape, hardware
    settings = _resolved("--micro_batch_size auto --gradient_accumulation_steps 16")
    layout = layout_of(StreamSettings(activations="ram"), settings, hardware)
    micro, why = forecaster.best_cut(settings, layout, 0)
    assert micro == expected and words in why
    plans = {}
    for rows in (1, 2, 4, 8, 16, 32):
        cut = replace(layout, micro_batch=rows, accumulation=32 // rows)
        plans[rows] = forecaster.of(settings.cut(rows, ""), cut, 0).plan
    fitting = [plan.time.step_s for plan in plans.values() if plan.fits]
    assert not fitting or (plans[micro].fits and plans[micro].time.step_s <= 1.01 * min(fitting))


def test_without_a_forecast_the_usual_cut_stays():
    forecaster = Forecaster(ModelSettings(preset="llama-1b", seq_length=64), None, has_cuda=False)
    forecaster._known, forecaster.problem = None, "not countable"
    settings = _resolved("--micro_batch_size auto")
    assert forecaster.best_cut(settings, StreamLayout(2, 4), 0) == (2, "not countable")


def test_a_run_is_as_long_whatever_its_cut():
    config = parse_config(["--num_train_epochs", "3", "--dataset", "x.txt"])
    found = [run_length(config, 17, 8, accumulation) for accumulation in (1, 2, 8)]
    assert {(one.total_steps, one.eval_steps, one.save_steps) for one in found} == {(7, 10, 1)}  # 51 rows


def test_a_resumed_run_keeps_its_cut_and_another_one_goes_on_with_the_same_rows(tmp_path, corpus, capsys):
    common = ["--run_name", "r", "--max_steps", "6", "--eval_steps", "0", "--no_export", "--precision", "fp32"]
    common += ["--packing", "off", "--save_steps", "4"]
    one = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4"]
    assert main(flags(tmp_path, corpus, *common, *one)) == 0
    whole = [(line["loss"], line["grad_norm"]) for line in metrics(tmp_path) if "event" not in line]
    start = ["--resume_from_checkpoint", str(tmp_path / "checkpoint/r/step-00000004")]
    for cut, said in (
        (["--per_device_train_batch_size", "auto"], "micro-batch auto: 4 of 1 row(s) a step and process (as in the"),
        (["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1"],
         "resume: per_device_train_batch_size 1 -> 4: training goes on with 4"),
    ):  # fmt: skip
        capsys.readouterr()
        assert main(flags(tmp_path, corpus, *common, *cut, *start)) == 0
        assert said in capsys.readouterr().out
        again = [(line["loss"], line["grad_norm"]) for line in metrics(tmp_path) if "event" not in line]
        assert len(again) == 6
        for (loss, norm), (loss_again, norm_again) in zip(whole, again, strict=True):
            assert loss_again == pytest.approx(loss, rel=1e-5) and norm_again == pytest.approx(norm, rel=1e-3)
        if "auto" in cut:
            assert again == whole  # the same bits


def test_a_balancing_loss_is_of_a_micro_batch_so_the_cut_stays(tmp_path, corpus, capsys):
    argv = flags(tmp_path, corpus, "--preset", "tiny-moe", "--micro_batch_size", "auto", "--plan")
    assert main(argv) in (0, 1)
    assert "2 of 2 row(s) a step and process (the experts' balancing loss" in capsys.readouterr().out
