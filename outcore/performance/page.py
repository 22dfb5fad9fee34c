"""logs/performance_report.html: one file with everything in it, pictures embedded, nothing fetched from anywhere."""

from __future__ import annotations

import base64
import html

from outcore.common.quantities import format_count, format_gb, format_gib, format_s
from outcore.performance import plots
from outcore.performance.findings import ComparedRow, Findings, Projection

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #f4f6f8; margin: 0; }
main { max-width: 1020px; margin: 0 auto; padding: 28px 20px 60px; }
section { background: #fff; border: 1px solid #dde3e9; border-radius: 10px; padding: 18px 22px; margin: 16px 0; }
h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 0 0 10px; }
.small { color: #5b6875; font-size: 13px; overflow-wrap: anywhere; }
.verdict { border-left: 10px solid; } .verdict strong { font-size: 26px; letter-spacing: .02em; }
.go { border-left-color: #009E73; } .warn { border-left-color: #E69F00; } .nogo { border-left-color: #B00000; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; }
.tile { background: #f4f6f8; border-radius: 8px; padding: 8px 14px; min-width: 130px; flex: 1; }
.tile b { display: block; font-size: 19px; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; color: #5b6875; font-weight: 600; }
td:first-child { white-space: nowrap; }
th, td { padding: 5px 8px; border-bottom: 1px solid #e7ecf0; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 8px; }
.ok { background: #009E73; } .note { background: #9aa5b1; } .warning { background: #E69F00; }
.stop { background: #B00000; }
.off { color: #B05a00; font-weight: 600; }
img { max-width: 100%; height: auto; display: block; margin: 6px 0; } ul { margin: 6px 0; padding-left: 20px; }
"""
CLASSES = {"GO": "go", "GO WITH WARNINGS": "warn", "NO-GO": "nogo"}


def render(found: Findings) -> str:
    """The page."""
    parts = [
        f"<h1>Performance test</h1><p class='small'>{_text(found.created_at)} · {_text(_machine_words(found))} · "
        f"{format_s(found.elapsed_s)}<br>python performance_test.py {_text(' '.join(found.argv))}</p>",
        _verdict(found),
    ]
    if found.projection is not None:
        parts.append(_projection(found.projection))
    if found.rows:
        parts.append(_plan(found))
    if found.trial is not None:
        parts.append(_steps(found))
    parts += [_checks(found), _comparison(found)]
    body = "\n".join(parts)
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{_text(found.verdict.word)} - performance test</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _text(words: object) -> str:
    return html.escape(str(words))


def _picture(png: bytes | None, words: str) -> str:
    if png is None:
        return ""
    return f"<img alt='{_text(words)}' src='data:image/png;base64,{base64.b64encode(png).decode()}'>"


def _machine_words(found: Findings) -> str:
    key = found.machine_key
    return f"{key['gpu'] or 'no GPU'}, {key['cpu']}, {format_gib(key['ram_total_bytes'])} RAM"


def _verdict(found: Findings) -> str:
    reasons = "".join(f"<li>{_text(reason)}</li>" for reason in found.verdict.reasons)
    word = found.verdict.word
    return f"<section class='verdict {CLASSES[word]}'><strong>{word}</strong><ul>{reasons}</ul></section>"


def _tile(value: str, words: str) -> str:
    return f"<div class='tile'><b>{_text(value)}</b><span class='small'>{_text(words)}</span></div>"


def _projection(run: Projection) -> str:
    tiles = [
        _tile(format_s(run.total_s), f"{run.total_steps:,} steps and what goes with them"),
        _tile(run.ends_at[5:], "month-day and time of the end, if it starts now"),
        _tile(format_s(run.step_s), "a step, median"),
        _tile(format_count(run.tokens_per_s), "tokens a second"),
        _tile(format_gb(run.written_bytes), f"written to the drive, {run.rating_words}"),
    ]
    split = (
        f"Training {format_s(run.training_s)}, evaluations {format_s(run.evaluations_s)}, checkpoints "
        f"{format_s(run.saves_s)}, start and compilation {format_s(run.startup_s)}."
    )
    return (
        f"<section><h2>The whole run</h2><div class='tiles'>{''.join(tiles)}</div>"
        f"<p class='small'>{split}</p></section>"
    )


def amount(row: ComparedRow, value: float | None) -> str:
    """A figure with its unit."""
    if value is None:
        return "-"
    if row.unit == "s":
        return format_s(value)
    return format_gb(value) if row.name.startswith(("drive", "checkpoint")) else format_gib(value)


def _plan(found: Findings) -> str:
    lines = []
    for row in found.rows:
        error = "-" if row.error_pct is None else f"{row.error_pct:+.0f} %"
        off = " off" if row.is_off else ""
        lines.append(
            f"<tr><td>{_text(row.name)}</td><td class='n'>{amount(row, row.planned)}</td>"
            f"<td class='n'>{amount(row, row.measured)}</td><td class='n{off}'>{error}</td></tr>"
        )
    head = "<tr><th></th><th class='n'>plan</th><th class='n'>measured</th><th class='n'>plan's error</th></tr>"
    picture = _picture(plots.plan_beside_measurement(list(found.rows)), "plan in percent of measurement")
    notes = "".join(f"<li>{_text(note)}</li>" for note in _plan_notes(found))
    return (
        f"<section><h2>Plan against measurement</h2><table>{head}{''.join(lines)}</table>{picture}"
        f"<ul class='small'>{notes}</ul></section>"
    )


def _plan_notes(found: Findings) -> list[str]:
    plan = (found.trial or {}).get("forecast") or {}
    return [*plan.get("machine_notes", []), *plan.get("notes", [])]


def _steps(found: Findings) -> str:
    trial = found.trial or {}
    start = trial["startup_s"]
    tiles = [
        _tile(format_s(start["model_load"]), "model load"),
        _tile(format_s(start["engine_init"]), "engine init"),
        _tile(format_s(trial["steps"][0]["step_s"]), "first step (compilation)"),
        _tile(format_s(trial["save_s"]) if trial.get("save_s") else "-", "checkpoint saved"),
        _tile(format_s(trial["load_s"]) if trial.get("load_s") else "-", "checkpoint loaded"),
    ]
    note = f"<p class='small'>Checkpoint {_text(trial['save_note'])}.</p>" if trial.get("save_note") else ""
    engine, model = trial["engine"], trial["model"]
    words = (
        f"{model['words']}, {format_count(model['params'])} parameters; engine {engine['name']} ({engine['reason']})"
    )
    return (
        f"<section><h2>Trial</h2><p class='small'>{_text(words)}</p><div class='tiles'>{''.join(tiles)}</div>{note}"
        f"{_picture(plots.phases(trial), 'seconds by step and phase')}"
        f"{_picture(plots.tiers_over_steps(trial), 'memory by tier over the measured steps')}</section>"
    )


def _checks(found: Findings) -> str:
    lines = [
        f"<tr><td><span class='dot {check.level}'></span>{_text(check.name)}</td><td>{_text(check.words)}</td></tr>"
        for check in found.checks
    ]
    return f"<section><h2>Machine</h2><table>{''.join(lines)}</table></section>"


def _comparison(found: Findings) -> str:
    if not found.regressions:
        return (
            "<section><h2>Since the last test</h2><p class='small'>Compared with: "
            f"{_text(found.compared_with)}. Nothing got worse by more than 10 %.</p></section>"
        )
    lines = [
        f"<tr><td>{_text(r.name)}</td><td class='n'>{r.before:.4g}</td><td class='n'>{r.now:.4g}</td>"
        f"<td class='n off'>{r.worse_pct:.0f} % worse</td></tr>"
        for r in found.regressions
    ]
    return (
        f"<section><h2>Since the last test</h2><p class='small'>{_text(found.compared_with)}</p>"
        f"<table>{''.join(lines)}</table></section>"
    )
