"""The Runs panel: what trains and what has trained, live; stop, resume, export, compare, delete."""

from __future__ import annotations

import time
from typing import Any

import gradio as gr

from outcore.common.quantities import format_gb, format_gib
from outcore.ui.client import Client, ClientError
from outcore.ui.panels import draw
from outcore.ui.panels.events import QUIET, Notice

REFRESH_S = 2.0
STALLS = {"stall_nvme": "drive", "stall_pcie": "PCIe", "stall_optimizer": "optimizer", "stall_ranks": "other GPUs"}
STALLS_WITHOUT_GPU = {**STALLS, "stall_pcie": "weights"}

OVERLAPPING = ("stall_", "collective_", "waited_rank_")
"""Phases that pass within the others."""


class RunsPanel:
    """A list, one run in full, and what can be done with it."""

    def __init__(self, client: Client, notice: Notice) -> None:
        self.client, self.notice = client, notice
        self.timer = gr.Timer(REFRESH_S)
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                self.list = gr.HTML()
                self.run = gr.Dropdown([], label="Run", interactive=True, elem_id="run")
                with gr.Row(elem_classes="oc-actions"):
                    self.stop = gr.Button("Stop (saves)", elem_id="stop_run")
                    self.resume = gr.Button("Resume", elem_id="resume_run")
                    self.export = gr.Button("Export", elem_id="export_run")
                    self.delete = gr.Button("Delete ...", variant="stop", elem_id="delete_run")
                with gr.Group(visible=False) as self.asked:
                    self.question = gr.HTML()
                    with gr.Row():
                        self.yes = gr.Button("Yes, delete it", variant="stop", elem_id="delete_yes")
                        self.no = gr.Button("Keep it", elem_id="delete_no")
                self.said = gr.HTML()
                with gr.Accordion("Compare runs", open=False):
                    self.chosen = gr.Dropdown([], label="Runs", multiselect=True, interactive=True)
                    self.compared = gr.HTML()
            with gr.Column(scale=3, min_width=300):
                self.state = gr.HTML(elem_id="run_state")
                with gr.Accordion("What it printed", open=True):
                    self.log = gr.HTML(elem_id="run_log")
                with gr.Accordion("Forecast, checkpoints", open=False):
                    self.more = gr.HTML()
                with gr.Accordion("Its settings", open=False):
                    self.settings = gr.HTML()
        self._wire()

    def refresh(self, name: str | None) -> tuple[Any, ...]:
        """Everything, for the run that is chosen, else the latest."""
        try:
            rows = self.client.get("runs")["data"]
        except ClientError as error:
            told = draw.said(str(error), "bad")
            return told, *[gr.skip()] * 5
        names = [row["name"] for row in rows]
        name = name if name in names else (names[0] if names else None)
        listed = list_of(rows, name)
        chooser = gr.update(choices=names, value=name)
        if name is None:
            empty = draw.said("No run here yet: start one in the Train panel.", "dim")
            return listed, chooser, empty, "", "", gr.update(choices=names)
        try:
            run, series = self.client.get("runs", name), self.client.get("runs", name, "series")
            lines = self.client.get("runs", name, "log")["lines"]
        except ClientError as error:
            return listed, chooser, draw.said(str(error), "bad"), "", "", gr.skip()
        log = draw.page(draw.console(lines[-40:]))
        return listed, chooser, state_of(run, series), log, more_of(run), gr.update(choices=names)

    def _wire(self) -> None:
        self.outputs = [self.list, self.run, self.state, self.log, self.more, self.chosen]
        self.timer.tick(self.refresh, self.run, self.outputs, **QUIET)
        self.run.input(self.refresh, self.run, self.outputs, **QUIET)
        self.run.change(self._settings, self.run, self.settings, **QUIET)
        self.run.change(lambda: gr.update(visible=False), None, self.asked, **QUIET)
        for button, work in ((self.stop, self._stop), (self.resume, self._resume), (self.export, self._export)):
            self.notice.on([button.click], work, self.run, [self.said])
        self.notice.on([self.delete.click], self._ask, self.run, [self.asked, self.question])
        self.no.click(lambda: gr.update(visible=False), None, self.asked, **QUIET)
        gone = self.notice.on([self.yes.click], self._delete, self.run, [self.said, self.asked])
        gone.then(self.refresh, self.run, self.outputs, **QUIET)
        self.notice.on([self.chosen.change], self._compare, self.chosen, [self.compared], **QUIET)

    def _settings(self, name: str | None) -> str:
        try:
            found = self.client.get("runs", name or "", "settings")
        except ClientError:
            return ""
        return draw.command("Command", found["command"]) + draw.command("YAML for --config", found["yaml"])

    def _stop(self, name: str) -> str:
        self.client.post("runs", _named(name), "stop")
        return draw.said(f"{name} finishes its step, saves and ends.", "good")

    def _resume(self, name: str) -> str:
        self.client.post("runs", _named(name), "resume")
        return draw.said(f"{name} goes on from its last checkpoint.", "good")

    def _export(self, name: str) -> str:
        self.client.post("runs", _named(name), "export")
        return draw.said(f"The model of {name} is being written; see Forecast, checkpoints.", "good")

    def _ask(self, name: str) -> tuple[Any, str]:
        run = self.client.get("runs", _named(name))
        words = (
            f"Delete {name} ({run['words']}, {draw.amount('nvme', run['size_bytes'])})? Checkpoints, logs and model go."
        )
        return gr.update(visible=True), draw.said(words, "bad")

    def _delete(self, name: str) -> tuple[str, Any]:
        found = self.client.delete("runs", _named(name))
        words = f"{name} is deleted ({draw.amount('nvme', found['size_bytes'])})."
        return draw.said(words, "good"), gr.update(visible=False)

    def _compare(self, names: list[str]) -> str:
        if len(names or []) < 2:
            return draw.said("Choose at least two.", "dim")
        found = self.client.get("run_comparison", names=",".join(names))
        series = {name: self.client.get("runs", name, "series") for name in names}
        return compared_of(found, series)


def _named(name: str | None) -> str:
    if not name:
        raise ClientError("Choose a run first.")
    return name


def list_of(rows: list[dict[str, Any]], chosen: str | None) -> str:
    """The table of runs."""
    if not rows:
        return ""
    body = []
    for row in rows[:30]:
        steps = f"{row['step']:,}" + (f" / {row['total_steps']:,}" if row["total_steps"] else "")
        mark = "▸ " if row["name"] == chosen else ""
        body.append((f"{mark}{row['name']}", row["state"], steps, draw.number(row["loss"], 4),
                     draw.amount("nvme", row["size_bytes"])))  # fmt: skip
    return draw.page(draw.table(("run", "state", "step", "loss", "size"), body, (2, 3, 4)))


def state_of(run: dict[str, Any], series: dict[str, Any]) -> str:
    """State of a run: where it is, and its graphs."""
    job, last, total = run["job"], run["last"], run["total_steps"]
    parts = [draw.paragraph(f"{run['name']}: {run['state']}", "big")]
    if job["message"] and run["state"] != "finished":
        parts.append(draw.paragraph(job["message"], "bad"))
    if total:
        left_s = (total - run["step"]) * (run["step_s"] or 0)
        left = f", {draw.seconds(left_s)} left" if run["state"] == "running" and left_s else ""
        parts.append(draw.fill_bar(run["step"] / total, f"step {run['step']:,} of {total:,}{left}"))
    if last:
        parts += [draw.paragraph(words, "bad") for words in run["alerts"]]
        phases = {name: value for name, value in run["phases"].items() if not name.startswith(OVERLAPPING[1:])}
        words = {name: f"waiting for {what}" for name, what in _stalls(last.get("gpu_mem_bytes")).items()}
        spent = ", ".join(f"{words.get(name, name)} {draw.seconds(value)}" for name, value in phases.items())
        parts.append(draw.paragraph(f"A step takes {draw.seconds(run['step_s'])}: {spent}" if spent else "", "dim"))
    return draw.page(*parts, graphs_of(series), _temperatures(last))


def graphs_of(series: dict[str, Any]) -> str:
    """All graphs of a run for which there are figures."""
    xs, found = series["steps"], series["series"]

    def line(key: str) -> list[float | None]:
        return found.get(key, [])

    evals = {e["step"]: e["eval_loss"] for e in series["evals"]}
    with_evals = sorted(set(xs) | set(evals))
    at = dict(zip(xs, found.get("loss", [])))
    loss = {"training": [at.get(x) for x in with_evals], "validation": [evals.get(x) for x in with_evals]}
    ram = {"RAM": line("ram_rss_bytes"), "pinned": line("pinned_bytes")}
    drive = {"read": line("nvme_read_bytes"), "written": line("nvme_write_bytes")}
    phases = series["phases"]
    work = {name: values for name, values in phases.items() if not name.startswith(OVERLAPPING)}
    stalls = _stalls(found.get("gpu_mem_bytes"))
    waits = {stalls.get(name) or name: values for name, values in phases.items() if name.startswith("stall_")}
    collectives, ranks = _named_by(phases, "collective_", ""), _named_by(phases, "waited_rank_", "GPU ")
    return draw.charts(
        draw.chart("Loss", with_evals, loss),
        draw.chart("A step's work", xs, work, draw.seconds),
        draw.chart("Of it waited for", xs, waits, draw.seconds),
        draw.chart("GPU 0 waited for", xs, ranks, draw.seconds),
        draw.chart("In collectives", xs, collectives, draw.seconds),
        draw.chart("Tokens/s", xs, {"": line("tokens_per_s")}),
        draw.chart("VRAM", xs, {"": line("gpu_mem_bytes")}, format_gib),
        draw.chart("RAM of the run", xs, ram, format_gib),
        draw.chart("Temperature", xs, {"GPU": line("gpu_temp_c"), "drive": line("nvme_temp_c")}, draw.in_unit(" °C")),
        draw.chart("PCIe", xs, {"to GPU": line("pcie_rx_gb_per_s"), "from GPU": line("pcie_tx_gb_per_s")}, draw.rate),
        draw.chart("Drive, a step", xs, drive, format_gb),
        draw.chart("Drive queue", xs, {"": line("nvme_queue_depth")}),
        draw.chart("Learning rate", xs, {"": line("lr")}),
    )


def _stalls(gpu_mem_bytes: Any) -> dict[str, str]:
    return STALLS_WITHOUT_GPU if gpu_mem_bytes is None else STALLS


def _named_by(phases: dict[str, Any], prefix: str, word: str) -> dict[str, Any]:
    """Seconds of the phases with this prefix, named by what follows it."""
    found = {name.removeprefix(prefix): values for name, values in phases.items() if name.startswith(prefix)}
    return {word + name.replace("_", " "): values for name, values in found.items()}


def _temperatures(last: dict[str, Any]) -> str:
    throttle = last.get("throttle")
    return draw.paragraph(f"The GPU holds back: {', '.join(throttle)}.", "note") if throttle else ""


def more_of(run: dict[str, Any]) -> str:
    """Forecast beside measurement, checkpoints, export."""
    words = {
        "step_s": "seconds a step", "vram_bytes": "VRAM", "rss_bytes": "RAM of the run",
        "drive_read_bytes_per_step": "read a step", "drive_written_bytes_per_step": "written a step",
    }  # fmt: skip

    def shown(what: str, value: float | None) -> str:
        if value is None:
            return "-"
        if what == "step_s":
            return draw.seconds(value)
        return draw.amount("nvme" if what.startswith("drive") else "ram", value)

    rows = [
        (words[r["what"]], shown(r["what"], r["forecast"]), shown(r["what"], r["measured"])) for r in run["forecast"]
    ]
    kept = [(c["name"], draw.amount("nvme", c["size_bytes"])) for c in run["checkpoints"]]
    export = run["export"]
    told = draw.paragraph(f"Export: {export['state']}. {export['message']}") if export else ""
    written = time.strftime("%d %b %H:%M", time.localtime(run["changed_at"]))
    return draw.page(
        draw.heading("Forecast and measurement"),
        draw.table(("", "forecast", "measured"), rows, (1, 2)),
        draw.heading("Checkpoints"),
        draw.table(("checkpoint", "size"), kept, (1,)) if kept else draw.paragraph("None yet.", "dim"),
        draw.paragraph(f"Model: {run['model']}") if run["model"] else "",
        told,
        draw.paragraph(f"Last written {written}.", "dim"),
    )


def compared_of(found: dict[str, Any], series: dict[str, dict[str, Any]]) -> str:
    """Runs side by side."""
    names = found["names"]
    steps = sorted({step for one in series.values() for step in one["steps"]})
    losses = {name: dict(zip(one["steps"], one["series"].get("loss", []))) for name, one in series.items()}
    lines = {name: [losses[name].get(step) for step in steps] for name in names}
    results = [(key, *(v if isinstance(v, str) else draw.number(v, 4) for v in values))
               for key, values in found["results"].items()]  # fmt: skip
    settings = [(key, *("-" if v is None else v for v in values)) for key, values in found["settings"].items()]
    return draw.page(
        draw.chart("Loss", steps, lines),
        draw.heading("What came of them"),
        draw.table(("", *names), results),
        draw.heading("Settings in which they differ"),
        draw.table(("", *names), settings) if settings else draw.paragraph("None.", "dim"),
    )
