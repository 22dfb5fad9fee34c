"""LiveDisplay: the terminal form of Progress, drawn by rich: a bar line and a line of figures, fitted to the width."""

from __future__ import annotations

from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from outcore.common.quantities import format_s

REFRESHES_PER_S = 1.0


class Shown(Protocol):
    """Protocol of the progress that a display shows."""

    total_steps: int | None

    def words(self) -> list[str]: ...

    def tier_words(self) -> list[str]: ...

    def elapsed_s(self) -> float: ...

    def fraction_done(self) -> float: ...


class LiveDisplay:
    """Redraws the state of a Progress in place until closed."""

    def __init__(self, progress: Shown, file: IO[str]) -> None:
        self._progress = progress
        self._console = Console(file=file, highlight=False)
        self._live = Live(
            console=self._console,
            get_renderable=self.render,
            refresh_per_second=REFRESHES_PER_S,
            redirect_stdout=True,
            redirect_stderr=True,
        )
        self._live.start(refresh=True)

    def print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        """The lines for the console's present width."""
        width = max(10, self._console.width - 1)
        words = self._progress.words()
        lines = [self._bar_line(words[0], width), fit_words(words[1:], width)]
        tiers = self._progress.tier_words()
        if tiers:
            lines.append(fit_words(tiers, width))
        return Group(*[line for line in lines if line.plain])

    def _bar_line(self, step_words: str, width: int) -> Text:
        progress = self._progress
        elapsed = format_s(progress.elapsed_s())
        if progress.total_steps is None:
            return Text(f"{step_words}  {elapsed}"[:width])
        done = progress.fraction_done()
        percent = f"{done * 100:.0f} %" if done < 0.995 or done >= 1 else "99 %"
        tail = f" {percent}  {elapsed}"
        bar_width = width - len(step_words) - len(tail) - 1
        if bar_width < 8:
            return Text(f"{step_words} {percent}"[:width])
        return Text.assemble((step_words + " ", "bold"), bar(done, bar_width), tail)


def bar(fraction: float, width: int, style: str = "cyan") -> Text:
    """A bar of `width` cells with eighths at its end."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    full, part = divmod(eighths, 8)
    cells = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")
    text = Text(cells, style=style)
    text.append("·" * (width - len(cells)), style="dim")
    return text


def fit_words(words: list[str], width: int) -> Text:
    """Join as many phrases as fit, separated; the first is cut rather than dropped."""
    line = ""
    for word in words:
        longer = f"{line}  {word}" if line else word
        if len(longer) > width:
            break
        line = longer
    return Text(line or (words[0][:width] if words else ""), no_wrap=True)
