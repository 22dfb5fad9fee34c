"""Space, memory, run warnings, sleep, and `outcore watch`."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.monitor import MemoryWatch, MetricsLog, RunWarnings, SpaceWatch, hold_off_sleep
from outcore.monitor.screen.frame import find_run, main, sparkline, watch
from outcore.monitor.watches.run_warnings import SpaceVerdict
from tests.monitor.fakes import fake_system
from tests.refused import failing, refused
from tests.waiting import until

GB = 10**9


# --- space and memory


@pytest.mark.parametrize(("free", "level"), [(50 * GB, "ok"), (15 * GB, "low"), (9 * GB, "full"), (0, "full")])
def test_space_levels(tmp_path: Path, free: int, level: str) -> None:
    verdict = SpaceWatch({tmp_path / "to" / "come": 10 * GB}, ask=lambda path: free).check()
    assert (verdict.level, verdict.must_stop) == (level, level == "full")
    assert verdict.free_bytes == free and verdict.reserve_bytes == 10 * GB
    assert str(tmp_path / "to" / "come") in verdict.words and "10.00 GB" in verdict.words


def test_the_worst_drive_counts_and_a_vanished_one_does_not_stop(tmp_path: Path) -> None:
    def ask(path: Path) -> int:
        if path.name == "b":
            raise OSError(5, "Input/output error")
        return 5

    watch = SpaceWatch({tmp_path: 10}, ask=ask)
    watch.reserves = {tmp_path / "b": 1, tmp_path / "a": 10}
    assert watch.check().path == tmp_path / "a"
    watch.reserves = {tmp_path / "b": 1}
    verdict = watch.check()
    assert verdict.level == "unknown" and not verdict.must_stop and "still there" in verdict.words


def test_space_watch_checks_its_arguments(tmp_path: Path) -> None:
    refused(ValueError, "at least one path", lambda: SpaceWatch({}))
    refused(ValueError, "negative", lambda: SpaceWatch({tmp_path: -1}))


def test_memory_levels(tmp_path: Path) -> None:
    """The fake machine has 16 GiB, 4 GiB of them available, and 2 MiB of the run in swap."""
    fake_system(tmp_path / "fake", tmp_path)
    root = tmp_path / "fake"
    watch = MemoryWatch(root=root, interval_s=0)
    patient = MemoryWatch(root=root, interval_s=1e9)
    assert patient.check().level == "ok"
    assert 0.4 < watch.reserve_bytes / 2**30 < 0.5
    verdict = watch.check()
    assert verdict.level == "ok" and verdict.words == "RAM: 4.00 GiB of 16.00 GiB left"
    low = MemoryWatch(3 * 2**30, root=root).check()
    assert low.level == "low" and "stops below 3.00 GiB" in low.words and not low.must_stop
    full = MemoryWatch(5 * 2**30, root=root).check()
    assert full.must_stop and "may kill the run" in full.words
    (root / "proc" / str(os.getpid()) / "status").write_text("VmSwap:\t 500000 kB\n")
    swapped = watch.check()
    assert swapped.level == "low" and "of the run in swap" in swapped.words
    assert patient.check().level == "ok"  # the same verdict within the interval
    refused(ValueError, "negative", lambda: MemoryWatch(-1))
    verdict = MemoryWatch(0).check()
    assert verdict.level in ("ok", "low") and verdict.words.startswith("RAM: ")


# --- warnings


FACTS = {"pcie_gen_max": 4, "pcie_width_max": 8, "gpu_power_limit_w": 140.0}


def quiet(**more: Any) -> dict[str, Any]:
    return {
        "step": 1, "step_s": 10.0, "phase_s": {"stall_nvme": 0.5}, "gpu_util_pct": 95, "gpu_temp_c": 80,
        "throttle": [], "pcie_gen": 4, "pcie_width": 8, "swap_used_bytes": 0, "own_swap_bytes": 0, "nvme_temp_c": 50.0,
        "nvme_read_bytes": 30 * GB, "nvme_write_bytes": 20 * GB, **more,
    }  # fmt: skip


def make_warnings(**settings: Any) -> RunWarnings:
    return RunWarnings(lambda: FACTS, **{"battery": lambda: None, **settings})


@pytest.mark.parametrize(("odd", "at"), [
    ({}, range(30)), ({"throttle": ["thermal (software)"], "pcie_width": 1, "nvme_temp_c": 90.0}, [20]),
    ({"pcie_gen": 1, "gpu_util_pct": 3}, range(30)),  # an idle GPU may lower its link
])  # fmt: skip
def test_a_healthy_run_single_odd_readings_and_an_idle_gpu_say_nothing(odd: dict[str, Any], at: Iterable[int]) -> None:
    warnings = make_warnings(drive_gb_per_s=6.0)
    assert [warnings.check(quiet(**(odd if step in at else {}))) for step in range(30)] == [[]] * 30
    assert RunWarnings(battery=lambda: None).check({}) == []


@pytest.mark.parametrize(("change", "words"), [
    ({"throttle": ["thermal (hardware)"]}, ["hot at 80 °C", "fans"]),
    ({"throttle": ["power cap"]}, ["power limit (140 W)", "charger"]),
    ({"throttle": ["power brake"]}, ["power brake", "supply"]), ({"pcie_width": 4}, ["gen 4 x4", "gen 4 x8", "BIOS"]),
    ({"pcie_gen": 1, "gpu_util_pct": None, "pcie_rx_gb_per_s": 2.0}, ["gen 1 x8"]),
    ({"phase_s": {"stall_nvme": 3.0}}, ["waits for the drive 30 %", "batch"]),
    ({"nvme_temp_c": 80.0}, ["drive is at 80", "heat sink"]),
    ({"own_swap_bytes": 1 << 30}, ["Swap is in use", "Close other programs"]),
])  # fmt: skip
def test_a_lasting_state_is_said_once_with_advice(change: dict[str, Any], words: list[str]) -> None:
    warnings = make_warnings()
    said = [text for _ in range(30) for text in warnings.check(quiet(**change))]
    assert len(said) == 1
    for word in words:
        assert word in said[0]


def test_swap_of_others_counts_only_when_it_grows() -> None:
    warnings = make_warnings()
    assert warnings.check(quiet(swap_used_bytes=3 << 30)) == []
    assert warnings.check(quiet(swap_used_bytes=(3 << 30) + 1000)) == []
    assert len(warnings.check(quiet(swap_used_bytes=4 << 30))) == 1


def test_a_drive_slower_than_measured() -> None:
    waiting = quiet(phase_s={"stall_nvme": 8.0})  # 50 GB in 10 s
    fast = make_warnings(drive_gb_per_s=5.5)
    assert not [w for _ in range(20) for w in fast.check(waiting) if "measured" in w]
    slow = make_warnings(drive_gb_per_s=9.0)
    said = [w for _ in range(20) for w in slow.check(waiting) if "measured" in w]
    assert len(said) == 1 and "5.0 GB/s" in said[0] and "9.0 GB/s" in said[0]


@pytest.mark.parametrize(("first", "then", "words"), [
    ((1000.0, 0.0, 0), 3.0, "waits for the drive 30 %"),  # compiles for long: it must not thin out the others
    ((10.0, 10.0, 50), 1.0, None),
    ((30.0, 5.0, 0), 9.0, "waits for the drive 90 %"),  # and no slow drive: it moved nothing at first
])  # fmt: skip
def test_the_first_step_does_not_judge_the_drive(first, then, words):
    """`first`: its seconds, those it waited, GB it read; `then`: seconds of 10 that each step after it waits."""
    step_s, stall_s, read_gb = first
    begun = quiet(step_s=step_s, phase_s={"stall_nvme": stall_s}, nvme_read_bytes=read_gb * GB, nvme_write_bytes=0)
    warnings = make_warnings(drive_gb_per_s=5.5)
    said = [text for record in [begun, *[quiet(phase_s={"stall_nvme": then})] * 5] for text in warnings.check(record)]
    assert len(said) == (words is not None) and all(str(words) in text for text in said)


def test_mains_power_lost_is_seen_within_half_a_minute() -> None:
    state = SimpleNamespace(percent=71, power_plugged=True)
    now = [0.0]
    warnings = make_warnings(battery=lambda: state, clock=lambda: now[0])
    assert warnings.check(quiet()) == []
    state.power_plugged = False
    assert warnings.check(quiet()) == []  # asked again only after 30 s
    now[0] = 31.0
    said = warnings.check(quiet())
    assert len(said) == 1 and "71 % left" in said[0] and "Plug in" in said[0]
    now[0] = 99.0
    assert warnings.check(quiet()) == []


def test_a_battery_that_cannot_be_read_is_said_once() -> None:
    now = [0.0]
    warnings = make_warnings(battery=failing(OSError("odd firmware")), clock=lambda: now[0])
    assert "odd firmware" in warnings.check(quiet())[0]
    now[0] = 1000.0
    assert warnings.check(quiet()) == []


def test_verdicts_are_said_once_by_level(tmp_path: Path) -> None:
    warnings = make_warnings()
    low, full = SpaceVerdict("low", "running out", tmp_path), SpaceVerdict("full", "nearly full", tmp_path)
    ok, ram = SpaceVerdict("ok", "fine", tmp_path), SpaceVerdict("low", "RAM: little", None)
    assert warnings.check(quiet(), [ok]) == []
    assert warnings.check(quiet(), [low, ram]) == ["running out", "RAM: little"]
    assert warnings.check(quiet(), [low, ram]) == []
    assert warnings.check(quiet(), [full]) == ["nearly full"]


# --- sleep


def test_sleep_is_held_until_close(tmp_path: Path) -> None:
    helper = ["sh", "-c", f"cat; touch {tmp_path}/ended"]
    with hold_off_sleep(commands=[["no-such-inhibitor"], helper]) as hold:
        assert hold.held and "by sh" in hold.words and not (tmp_path / "ended").exists()
    assert not hold.held and (tmp_path / "ended").exists()
    hold.close()


def test_a_refusal_is_a_hold_that_does_nothing() -> None:
    commands = [["no-such-inhibitor"], ["sh", "-c", "echo Access denied >&2; exit 1"]]
    with hold_off_sleep(commands=commands) as hold:
        assert not hold.held
        assert "no-such-inhibitor is not installed" in hold.words and "Access denied" in hold.words
        assert "power plan" in hold.words


def test_a_helper_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.monitor.watches.sleep_hold.WAIT_S", 0.1)
    hold = hold_off_sleep(commands=[["sleep", "30"]])
    assert not hold.held and "no answer" in hold.words


def test_this_system_and_wsl2_are_asked_without_raising(tmp_path: Path) -> None:
    with hold_off_sleep() as hold:
        assert hold.words
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "version").write_text("Linux version 6.6.87.2-microsoft-standard-WSL2")
    with hold_off_sleep(root=tmp_path) as hold:
        assert "powershell.exe" in hold.words


def test_the_helper_ends_with_a_killed_run(tmp_path: Path) -> None:
    code = (
        "import time; from outcore.monitor import hold_off_sleep\n"
        f"hold = hold_off_sleep(commands=[['sh', '-c', 'cat; touch {tmp_path}/ended']])\n"
        "print(hold.held, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "True\n"
    process.kill()
    process.communicate()
    until((tmp_path / "ended").exists)


# --- watch


def write_run(folder: Path, num_steps: int = 30, **header: Any) -> Path:
    with MetricsLog(folder / "metrics.jsonl") as log:
        links = {"h2d_gb_per_s": 12.5, "drive_read_gb_per_s": 6.0}
        sampler = {"gpu_mem_total_bytes": 8 << 30, "ram_total_bytes": 64 << 30}
        log.write_header({"model": {"name": "llama-8b"}, "machine": {**sampler, "links": links}, **header})
        for step in range(1, num_steps + 1):
            log.write_step(
                quiet(
                    step=step, loss=10.0 / step, lr=1e-4, tokens=step * 4096, tokens_per_s=409.6, pcie_rx_gb_per_s=10.0,
                    gpu_mem_bytes=7 << 30, ram_available_bytes=16 << 30, nvme_free_bytes=10**12, gpu_power_w=100.0,
                    throttle=["power cap"],
                )
            )  # fmt: skip
        if num_steps:
            log.write_eval({"step": num_steps, "eval_loss": 2.25})
    return folder


def shown(folder: Path, width: int = 100) -> str:
    out = io.StringIO()
    watch(folder, once=True, width=width, file=out)
    return out.getvalue()


def test_one_frame_has_it_all(tmp_path: Path) -> None:
    text = shown(write_run(tmp_path / "my run", total_steps=100))
    for words in (
        "my run · llama-8b · running", "step 30 of 100", "11 min 40 s left", "evaluation 2.250 at step 30", "▁", "█",
        "410 tokens/s", "10.0 s per step", "122.88 k tokens seen", "stall_nvme", "5 %", "7.0/8.0 GiB",
        "48.0/64.0 GiB", "1.00 TB free", "10.00 of 12.5 GB/s", "3.00 of 6.0 GB/s", "2.00 GB/s", "80 °C", "100 W",
        "drive 50 °C", "throttled: power cap", "600.00 GB w",
    ):  # fmt: skip
        assert words in text, words
    assert "\x1b" not in text


def test_finished_stopped_and_empty_runs(tmp_path: Path) -> None:
    assert "finished" in shown(write_run(tmp_path / "done", plan={"total_steps": 30}))
    stopped = write_run(tmp_path / "stopped", total_steps=100)
    os.utime(stopped / "metrics.jsonl", (1, 1))
    assert "no new step for" in shown(stopped)
    assert "no step is finished yet" in shown(write_run(tmp_path / "new", num_steps=0))
    with MetricsLog(tmp_path / "nan" / "metrics.jsonl") as log:
        log.write_step({"step": 1, "loss": float("nan")})
    assert "none that is finite" in shown(tmp_path / "nan")


def test_runs_are_found_by_name_path_and_time(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    refused(ValueError, "no run under", lambda: find_run(None, logs))
    old, new = write_run(logs / "old", 1), write_run(logs / "new", 1)
    os.utime(old / "metrics.jsonl", (1, 1))
    assert find_run(None, logs) == new
    assert find_run("old", logs) == old and find_run(str(old), "elsewhere") == old
    refused(ValueError, "Runs there: new, old", lambda: find_run("odl", logs))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "logs" / "r", 3)
    assert main(["r", "--once", "--logs", str(tmp_path / "logs")]) == 0
    assert "step 3" in capsys.readouterr().out
    assert main(["nothing", "--logs", str(tmp_path / "logs")]) == 2
    assert "Runs there: r" in capsys.readouterr().err


def test_live_view_follows_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    run = write_run(tmp_path / "run", 5)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 1:
            with MetricsLog(run / "metrics.jsonl", resume_step=5) as log:
                log.write_step(quiet(step=6, loss=1.0))
        if len(naps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("outcore.monitor.screen.frame.time", SimpleNamespace(sleep=nap, time=time.time))
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    watch(run, width=80, file=out)
    assert "step 5" in out.getvalue() and "step 6" in out.getvalue()


def test_sparkline() -> None:
    assert sparkline([], 5) == "" and sparkline([1.0, 1.0], 5) == "▁▁"
    assert sparkline([0.0, 1.0], 5) == "▁█" and len(sparkline([float(i) for i in range(1000)], 40)) == 40
