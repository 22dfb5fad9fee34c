"""What fails around a run does not stop it: profile, NVML, sensors, the metrics port. A whole run of a tiny model."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from outcore.plan.run import forecast as forecast_module
from outcore.train.run import assemble as context
from outcore.train.run import main
from tests.monitor.fakes import FakeNvml, FakeNvmlError, make_sampler

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5


class Faults:
    """A sampler with a fake machine, in which something breaks at a step."""

    def __init__(self, root: Path, nvml: FakeNvml, break_at: int) -> None:
        self.nvml, self.break_at, self.steps = nvml, break_at, 0
        self.sampler, self.device = make_sampler(root, nvml)

    def make(self, *_: object, **__: object) -> Any:
        """In place of the run's own sampler; samples once a step, on the run's thread."""
        sampler, faults = self.sampler, self
        snapshot = sampler.snapshot

        def looked(*args: Any) -> dict[str, Any]:
            faults.steps += 1
            if faults.steps == faults.break_at:
                faults.nvml.errors["*"] = FakeNvmlError(FakeNvml.NVML_ERROR_GPU_IS_LOST, "GPU is lost")
                (faults.device / "stat").unlink()
            sampler.sample_once()
            return snapshot(*args)

        sampler.snapshot = looked  # type: ignore[method-assign]
        sampler.start = lambda: sampler  # type: ignore[method-assign]
        return sampler


def _train(root: Path, monkeypatch: pytest.MonkeyPatch, profile: Path, faults: Faults, *flags: str) -> list[dict]:
    """A run of STEPS steps that must end well; its step lines."""
    monkeypatch.chdir(ROOT)
    real = forecast_module.run_hardware
    monkeypatch.setattr(forecast_module, "run_hardware", lambda *args: real(*args, measured=profile))
    monkeypatch.setattr(context, "Sampler", faults.make)
    corpus = root / "text.txt"
    corpus.write_text("\n\n".join(f"the quick brown fox {i} jumps over the lazy dog " * 30 for i in range(20)))
    argv = ["--dataset", str(corpus), "--seq_length", "32", "--max_steps", str(STEPS), "--run_name", "r"]
    argv += [f"--{name}_dir={root / name}" for name in ("checkpoint", "log", "export")]
    argv += [f"--data_cache_dir={root / 'cache'}", "--report_to", "none", "--no_export"]
    argv += ["--sample_steps", "0", "--sample_tokens", "4"]
    argv += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1", *flags]
    assert main(argv) == 0
    lines = [json.loads(line) for line in (root / "log" / "r" / "metrics.jsonl").read_text().splitlines()]
    assert (root / "checkpoint" / "r" / f"step-{STEPS:08d}" / "manifest.json").is_file()
    return [line for line in lines if "event" not in line]


def test_gpu_drive_profile_and_port_fail_and_training_goes_on(tmp_path, monkeypatch, capsys):
    profile = tmp_path / "machine_profile.json"
    profile.write_text('{"format_version": 1, "os_fam')
    faults = Faults(tmp_path / "machine", FakeNvml(), break_at=3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        steps = _train(tmp_path, monkeypatch, profile, faults, "--metrics_port", port)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["gpu_temp_c"] for step in steps] == [60, 60, None, None, None]
    assert [step["nvme_read_bytes"] is None for step in steps] == [False, False, True, True, True]
    said = capsys.readouterr()
    assert (said.out + said.err).count("GPU is lost") == 1 and port in said.out + said.err
    plan = json.loads((tmp_path / "log" / "r" / "plan.json").read_text())
    notes = " ".join(plan["forecast"]["machine_notes"])
    assert "damaged" in notes and "nominal" in notes and plan["forecast"]["time_s"]["step_s"] > 0
    assert set(plan["startup_s"]) == {"settings", "data", "plan", "model_load", "engine_init", "logs"}
    assert steps[0]["startup_s"].keys() == plan["startup_s"].keys() | {"first_step", "compile"}
    assert steps[0]["startup_s"]["first_step"] == steps[0]["step_s"] and not any("startup_s" in s for s in steps[1:])
