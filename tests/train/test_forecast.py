"""The forecast of a run: of what was really chosen, on the machine as it is, and never a reason to stop."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outcore.config import DeepSpeedFile, ProcessFacts, TrainConfig, resolve
from outcore.engine.deepspeed.settings import ChosenOffload
from outcore.engine.stream import StreamSettings
from outcore.machine import LinkRates
from outcore.model import ModelSettings, preset_shape
from outcore.plan.run import Forecast, Forecaster
from outcore.plan.run import forecast as forecast_module
from outcore.plan.run.forecast import run_hardware
from outcore.train.run import main
from outcore.train.run.planned import kept_on_drive
from tests.engine.even_model import EvenModel
from tests.plan.fakes import machine, plan_of, server

ROOT = Path(__file__).resolve().parents[2]
SHAPE = preset_shape("llama-3b")


def test_the_streaming_engines_settings_are_planned_as_they_are():
    n = SHAPE.total_params
    told = StreamSettings(states="split", activations="ram", nvme_path="/x", state_ram_bytes=4 * n, num_layer_buffers=2)
    p = plan_of(SHAPE, server(), told)
    assert (p.engine, p.state_format, p.micro_batch, p.accumulation) == ("stream", "split", 4, 2)
    assert p.part_bytes("nvme", "moments") == pytest.approx(
        (7 + 8 / 256 + 1) * n * 0.6, rel=1e-6
    )  # compressed, and room
    plain = plan_of(SHAPE, server(), replace(told, compress_on_nvme=False))
    assert plain.part_bytes("nvme", "moments") == pytest.approx(8 * n * 0.6, rel=1e-6)
    assert plain.drive_written_bytes_per_step > p.drive_written_bytes_per_step
    assert p.homes["activation checkpoints"] == "RAM"
    layer, head = SHAPE.layer_params[0], SHAPE.ends_params
    assert p.part_bytes("vram", "parameters") == 2 * (2 * layer + head)
    whole = plan_of(SHAPE, server(ram_bytes=1 << 30), StreamSettings())
    assert not whole.uses_drive and not whole.fits  # the engine was told RAM, so RAM is what is short
    eager = plan_of(SHAPE, server(), StreamSettings(compile="off"))
    assert eager.time.compute_s > plan_of(SHAPE, server(), StreamSettings()).time.compute_s


@pytest.mark.parametrize(("stage", "optimizer", "params", "name"), [
    (0, "none", "none", "none"), (2, "cpu", "none", "zero2"), (3, "cpu", "cpu", "zero3"),
    (3, "nvme", "cpu", "infinity"),
])  # fmt: skip
def test_deepspeeds_homes_are_planned_as_they_are(stage: int, optimizer: Any, params: Any, name: str):
    p = plan_of(SHAPE, server(), ChosenOffload(stage, optimizer, params, None, staged=optimizer == "nvme"))
    assert (p.engine, p.zero_stage) == ("deepspeed", name)
    assert p.homes["optimizer states"] == {"none": "VRAM", "cpu": "RAM", "nvme": "NVMe"}[optimizer]
    assert p.uses_drive == (optimizer == "nvme")


def test_staged_states_are_planned_in_their_format():
    n = SHAPE.total_params
    stock = ChosenOffload(3, "cpu", "cpu", None)
    staged = ChosenOffload(3, "cpu", "cpu", None, staged=True, states="split8")
    slow, fast = (plan_of(SHAPE, server(), offload) for offload in (stock, staged))
    assert fast.state_format == "split8" and fast.part_bytes("ram", "master") == 2 * n
    assert (
        fast.part_bytes("ram", "DeepSpeed's further copies") == 0 < slow.part_bytes("ram", "DeepSpeed's further copies")
    )
    assert fast.time.cpu_optimizer_s < slow.time.cpu_optimizer_s / 3


def test_plan_flag_prints_and_makes_nothing(tmp_path, monkeypatch, capsys):
    corpus = tmp_path / "text.txt"
    corpus.write_text("\n\n".join(f"the quick brown fox {i} jumps over the lazy dog " * 30 for i in range(20)))
    monkeypatch.chdir(ROOT)
    flags = ["--plan", "--dataset", str(corpus), "--seq_length", "32", f"--data_cache_dir={tmp_path / 'cache'}"]
    flags += [f"--{name}_dir={tmp_path / name}" for name in ("checkpoint", "log", "export")]
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert "fits" in out and "stream" in out and "Every ZeRO stage (VRAM" in out
    assert "Run it: the same command without --plan" in out, "its own flags would lack the data"
    assert not [name for name in ("checkpoint", "log", "export") if (tmp_path / name).exists()]
    small = server(ram_bytes=1 << 20, vram_bytes=1 << 20, is_cpu=True)
    monkeypatch.setattr(forecast_module, "run_hardware", lambda *a, **k: small)
    assert main(flags) == 1
    assert "does not fit" in capsys.readouterr().out
    monkeypatch.setattr(forecast_module, "run_shape", lambda *a, **k: 1 / 0)
    assert main(flags) == 2
    assert "no forecast for this run" in capsys.readouterr().err


def _profile(path: Path, **changes: Any) -> Path:
    return machine(**changes).save(path / "machine_profile.json")


@pytest.mark.parametrize("problem", ["missing", "damaged", "stale", "half measured"])
def test_a_bad_profile_means_nominal_rates_and_words(tmp_path: Path, problem: str):
    path = tmp_path / "machine_profile.json"
    words = {"missing": "never measured", "damaged": "damaged", "stale": "measured on another machine"}
    if problem == "damaged":
        path.write_text('{"format_version": 1, "os_fam')
    elif problem == "stale":
        _profile(tmp_path, cpu_name="Another CPU")
    elif problem == "half measured":
        _profile(tmp_path, links=LinkRates("measured", 25.0, 24.0))
    hardware = run_hardware(True, measured=path, detect=lambda: machine(links=None))
    notes = " ".join(hardware.notes)
    assert words.get(problem, "drive_read_gb_per_s was not measured") in notes and "nominal" in notes
    assert hardware.drive_read_gb_per_s > 0


def test_a_good_profile_is_taken_and_a_gpu_that_torch_cannot_use_is_none(tmp_path: Path):
    path = _profile(tmp_path)
    hardware = run_hardware(True, measured=path, detect=lambda: machine(links=None))
    assert hardware.h2d_gb_per_s == 25.0 and not hardware.notes
    assert run_hardware(False, measured=path, detect=lambda: machine(links=None)).is_cpu


def _decided(stream: StreamSettings) -> Any:
    said = TrainConfig(per_device_train_batch_size=2, gradient_accumulation_steps=1)
    settings = resolve(said, DeepSpeedFile(), ProcessFacts("bf16"))
    decided = EvenModel(10**6, 10**6, 2, 64, (128,), 10**11, has_cuda=False).decide(settings)
    return replace(decided, told=stream)


def test_checkpoints_count_where_they_are_written(tmp_path: Path):
    settings, decided = ModelSettings(preset="tiny", seq_length=64), _decided(StreamSettings())
    forecaster = Forecaster(settings, None, has_cuda=False)
    sizes = []
    for kept in (0, 1, 2):
        plan = forecaster.of(decided.settings, decided.layout, kept).plan
        assert plan is not None
        sizes.append(plan.part_bytes("nvme", "checkpoints"))
    assert sizes[0] == 0 and sizes[1] > 0 and sizes[2] == 1.5 * sizes[1]  # one more while it is written
    config = TrainConfig(checkpoint_dir=str(tmp_path / "checkpoints"), save_total_limit=3)
    assert kept_on_drive(config, None) == kept_on_drive(config, str(tmp_path / "nvme")) == 3
    assert kept_on_drive(config, "/dev/shm") == 0  # another drive
    assert kept_on_drive(replace(config, save_strategy="no"), str(tmp_path)) == 0


def test_whatever_fails_in_a_forecast_is_a_sentence(monkeypatch: pytest.MonkeyPatch):
    settings, decided = ModelSettings(preset="tiny", seq_length=64), _decided(StreamSettings())
    fine = Forecaster(settings, None, has_cuda=False).of(decided.settings, decided.layout, 2)
    assert fine.plan is not None and fine.problem == ""
    assert Forecast(None, server(sources={"h2d_gb_per_s": "measured", "ram_gb_per_s": "nominal"})).measured_links() == {
        "h2d_gb_per_s": 55.5
    }
    drives = {"drive_read_gb_per_s": "measured"}
    assert Forecast(None, server(sources=drives)).measured_links()["drive_mixed_gb_per_s"] == 3.9
    header, record = fine.header(), fine.to_dict()
    assert header is not None and record is not None and header["step_s"] == record["time_s"]["step_s"] > 0
    assert header["rss_bytes"] == record["expected_rss_bytes"] < record["ram_bytes"]
    asked = json.loads(json.dumps(record["asked"]))  # for a planner of later
    assert asked["request"]["save_total_limit"] == 2 and asked["shape"]["hidden_size"] > 0 and asked["hardware"]

    def broken(*_: object, **__: object) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(forecast_module, "plan_layout", broken)
    late = Forecaster(settings, None, has_cuda=False).of(decided.settings, decided.layout, 2)
    monkeypatch.setattr(forecast_module, "load_hardware", broken)
    early = Forecaster(settings, None, has_cuda=False).of(decided.settings, decided.layout, 2)
    for forecast in (late, early):
        assert forecast.plan is None and forecast.to_dict() is None and forecast.header() is None
        assert "no forecast for this run" in forecast.problem and "no such thing" in forecast.problem
