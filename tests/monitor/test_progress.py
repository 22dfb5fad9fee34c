"""Progress on a terminal and in a log file, and loss.png."""

import io
import math
from pathlib import Path

import pytest

from outcore.monitor import MetricsLog, RunProgress, plot_loss
from outcore.monitor.metrics.reader import smooth
from tests.waiting import until

GIB = 1 << 30
LIMITS = {"gpu_mem_total_bytes": 8 * GIB, "ram_total_bytes": 64 * GIB, "nvme_total_bytes": 10**12}


def record(step: int, **more: object) -> dict:
    return {
        "step": step, "loss": 2.34567, "lr": 3e-4, "grad_norm": 0.5, "tokens_per_s": 12_345, "step_s": 2.0,
        "gpu_mem_bytes": 6 * GIB, "ram_available_bytes": 16 * GIB, "pinned_bytes": 2 * GIB,
        "nvme_free_bytes": 4 * 10**11, **more,
    }  # fmt: skip


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_plain_lines_by_steps_with_no_control_codes() -> None:
    out = io.StringIO()
    with RunProgress(10, file=out, plain_every_steps=4, plain_every_s=1e9, limits=LIMITS) as progress:
        for step in range(1, 11):
            progress.update(record(step))
        progress.message("saved [step 10]")
    lines = out.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines[:-1]] == ["step 1/10", "step 5/10", "step 9/10", "step 10/10"]
    assert lines[-1] == "saved [step 10]"
    assert lines[1] == (
        "step 5/10 | loss 2.3457 | 12.35 k tok/s | 10.0 s left | lr 0.0003 | grad norm 0.500 | "
        "VRAM 6.0/8.0 GiB | RAM 48.0/64.0 GiB | pinned 2.0 GiB | drive 400.00 GB free"
    )
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()


def test_plain_lines_by_time_and_the_last_step_always() -> None:
    out = io.StringIO()
    progress = RunProgress(None, file=out, plain_every_s=0)
    progress.update(record(1))
    progress.update(record(2))
    progress._every_s = 1e9
    progress.update(record(3))
    progress.activity("saving step 3")
    progress.close()
    progress.update(record(4))
    assert [line.split(" | ")[0] for line in out.getvalue().splitlines()] == [
        "step 1", "step 2", "saving step 3", "step 3",
    ]  # fmt: skip
    assert "left" not in out.getvalue()


def test_loss_that_is_not_finite_is_shown() -> None:
    out = io.StringIO()
    progress = RunProgress(2, file=out)
    progress.update({"step": 1, "loss": math.nan})
    progress.update({"step": 2, "loss": None, "nonfinite": {"loss": "inf"}})
    assert "loss nan" in out.getvalue() and "loss inf" in out.getvalue()


def test_nothing_is_shown_on_other_ranks() -> None:
    out = Terminal()
    with RunProgress(2, file=out, enabled=False) as progress:
        progress.update(record(1))
        progress.message("x")
        progress.activity("y")
    assert out.getvalue() == ""


def test_a_reader_that_went_away_does_not_stop_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    progress = RunProgress(3, file=Gone(), plain_every_s=0)
    progress.update(record(1))
    progress.update(record(2))
    progress.close()


@pytest.mark.parametrize("width", [20, 45, 80, 200])
def test_live_lines_fit_every_width(width: int) -> None:
    from rich.console import Console

    out = Terminal()
    progress = RunProgress(100, file=out, limits=LIMITS, first_step=40)
    display = progress._live
    display._live.console.width = width
    assert progress.fraction_done() == 0.4
    progress.update(record(50))
    progress.activity("evaluating")
    screen = Console(width=width, file=io.StringIO(), force_terminal=False)
    screen.print(display.render())
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert len(lines) == 3 and all(len(line) <= width for line in lines)
    assert "step 50/100" in text and "50 %" in text and "VRAM" in text
    if width == 200:
        assert "1 min 40 s left" in text and "█" in text and "drive" in text and "evaluating" in text
    progress.message("kept [bold] line")
    progress.close()
    assert "kept [bold] line" in out.getvalue()
    progress.close()


def test_live_without_a_last_step_and_before_the_first() -> None:
    out = Terminal()
    progress = RunProgress(None, file=out)
    assert progress.words() == ["step 1"] and progress.time_left_s() is None
    progress.update({"step": 1})
    assert progress.fraction_done() == 0.0
    progress.close()
    assert "step 1" in out.getvalue()


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_the_first_step_tells_what_it_is_at(kind: type[io.StringIO]) -> None:
    out = kind()
    at = iter(f"forward, layer {number} (being compiled)" for number in range(1000))
    with RunProgress(10, file=out, plain_every_s=0.02, doing=lambda: next(at)):
        until(lambda: "step 1, forward, layer 2 (being compiled)" in out.getvalue())


def write_run(path: Path, losses: list[float | None], **more: object) -> Path:
    with MetricsLog(path) as log:
        log.write_header({"run": "demo", "model": {"name": "tiny"}})
        for step, loss in enumerate(losses, 1):
            log.write_step({"step": step, "loss": loss, **more})
    return path


@pytest.mark.more(after=1)
@pytest.mark.parametrize("num_steps", [1, 2, 12, 9000])
def test_plot_of_few_and_many_points(tmp_path: Path, num_steps: int) -> None:
    losses: list[float | None] = [2 + 8 / step for step in range(1, num_steps + 1)]
    path = write_run(tmp_path / "metrics.jsonl", losses, lr=1e-4)
    with MetricsLog(path, resume_step=num_steps) as log:
        log.write_header({})
        log.write_eval({"step": num_steps, "eval_loss": 2.5})
        log.write_step({"step": num_steps + 100, "loss": math.nan, "eval_loss": 2.4})
    png = tmp_path / "out" / "loss.png"
    assert plot_loss(path, png) is True
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [file.name for file in png.parent.iterdir()] == ["loss.png"]


def test_a_title_in_any_script_is_drawn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = write_run(tmp_path / "metrics.jsonl", [2.0, 1.0])
    assert plot_loss(path, tmp_path / "loss.png", title="模型 training 訓練 🙂 costs $x^{$") is True
    assert not [str(warning.message) for warning in recwarn]


def test_plot_of_nothing_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path / "metrics.jsonl", [None])
    assert plot_loss(path, tmp_path / "loss.png") is False and not (tmp_path / "loss.png").exists()
    assert plot_loss(write_run(tmp_path / "nan.jsonl", [math.nan, math.inf]), tmp_path / "loss.png") is True
    with pytest.raises(FileNotFoundError):
        plot_loss(tmp_path / "absent.jsonl", tmp_path / "loss.png")


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = write_run(tmp_path / "metrics.jsonl", [1.0, 2.0])
    (tmp_path / "loss.png").mkdir()
    with pytest.raises(OSError):
        plot_loss(path, tmp_path / "loss.png")
    assert not list(tmp_path.glob(".loss*"))


def test_smoothing_follows_without_lag_or_spikes() -> None:
    line = [10 - step * 0.01 for step in range(400)]
    spiked = list(line)
    spiked[200], spiked[201], spiked[300] = 50.0, math.nan, 50.0
    smoothed = smooth(spiked, 20)
    assert math.isnan(smoothed[201])
    for at in (0, 100, 200, 250, 300):
        assert abs(smoothed[at] - line[at]) < 0.05, at
    assert smooth([], 5) == [] and all(math.isnan(value) for value in smooth([math.nan] * 3, 5))


def test_a_long_step_is_heard_of_in_a_pipe():
    out = io.StringIO()
    with RunProgress(3, file=out, plain_every_s=0.1) as progress:
        until(lambda: "step 1: " in out.getvalue())
        progress.activity("saving step 1")
        until(lambda: "saving step 1: " in out.getvalue())
    lines = out.getvalue().splitlines()
    assert any(line.startswith("step 1: ") and line.endswith("so far") for line in lines)
    assert any(line.startswith("saving step 1: ") for line in lines)
