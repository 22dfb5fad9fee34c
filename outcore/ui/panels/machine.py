"""The Machine panel: what this computer is, what was measured of it, how it feels now."""

from __future__ import annotations

from functools import partial
from typing import Any

import gradio as gr

from outcore.common.quantities import format_gib
from outcore.common.words import own_command
from outcore.ui.client import Client, ClientError
from outcore.ui.panels import draw
from outcore.ui.panels.events import QUIET, Notice

REFRESH_S = 3.0
chart = partial(draw.chart, axis="seconds before now")
LINKS = (
    ("h2d_gb_per_s", "RAM to GPU"),
    ("d2h_gb_per_s", "GPU to RAM"),
    ("both_ways_gb_per_s", "both ways, sum"),
    ("drive_read_gb_per_s", "drive, reading"),
    ("drive_write_gb_per_s", "drive, writing"),
    ("drive_mixed_gb_per_s", "drive, both, sum"),
    ("ram_gb_per_s", "RAM"),
)
THRESHOLDS = (
    ("gpu_temp_c", "GPU, °C"),
    ("nvme_temp_c", "Drive, °C"),
    ("ram_used_share", "RAM full, share"),
    ("vram_used_share", "VRAM full, share"),
    ("drive_used_share", "Drive full, share"),
    ("swap_used_gib", "Swapped out, GiB"),
)


class MachinePanel:
    """Facts once, graphs all the time."""

    def __init__(self, client: Client, notice: Notice) -> None:
        self.client = client
        self.alerts = gr.HTML(elem_id="alerts")
        self.graphs = gr.HTML(elem_id="machine_graphs")
        self.serving = gr.HTML(elem_id="serving_graphs")
        with gr.Row():
            with gr.Column(min_width=300):
                self.facts = gr.HTML(elem_id="machine_facts")
            with gr.Column(min_width=300):
                self.setup = gr.HTML()
        with gr.Accordion("Thresholds: above them there is an alert", open=False):
            with gr.Row():
                self.limits = {name: gr.Number(label=words, min_width=140) for name, words in THRESHOLDS}
            self.save = gr.Button("Keep these thresholds")
            self.said = gr.HTML()
        self.timer = gr.Timer(REFRESH_S)
        self.live = [self.alerts, self.graphs, self.serving]
        self.timer.tick(self.refresh, None, self.live, **QUIET)
        notice.on([self.save.click], self._save, list(self.limits.values()), [self.said])

    def open(self) -> tuple[Any, ...]:
        """Facts, reports, thresholds."""
        try:
            found, limits = self.client.get("machine"), self.client.get("machine", "thresholds")
        except ClientError as error:
            return draw.said(str(error), "bad"), "", *[gr.skip()] * len(THRESHOLDS)
        return facts_of(found), setup_of(found) + probe_of(found["probe"]), *(limits[name] for name, _ in THRESHOLDS)

    def refresh(self) -> tuple[str, str, str]:
        """Alerts and graphs."""
        try:
            live, serving = self.client.get("machine", "live"), self.client.get("model", "live")
        except ClientError as error:
            return draw.said(str(error), "bad"), "", ""
        return alerts_of({"alerts": live["alerts"] + serving["alerts"]}), graphs_of(live), serving_of(serving)

    def _save(self, *values: float) -> str:
        self.client.put("machine", "thresholds", **dict(zip(self.limits, values, strict=True)))
        return draw.said("Kept.", "good")


def alerts_of(live: dict[str, Any]) -> str:
    """Draw the alerts: what is above its threshold."""
    return draw.page(*(draw.paragraph(one["words"], "bad") for one in live["alerts"])) if live["alerts"] else ""


def graphs_of(live: dict[str, Any]) -> str:
    """The last quarter of an hour."""
    samples, limits = live["samples"], live["limits"]
    if len(samples) < 2:
        return draw.said("Graphs begin in a few seconds.", "dim")
    now = samples[-1]["time"]
    xs = [round(one["time"] - now, 1) for one in samples]

    def line(key: str, less_than: float | None = None) -> list[float | None]:
        values = [one.get(key) for one in samples]
        return values if less_than is None else [None if v is None else less_than - v for v in values]

    ram_bytes = limits.get("ram_total_bytes") or 0
    pcie = {"to GPU": line("pcie_rx_gb_per_s"), "from GPU": line("pcie_tx_gb_per_s")}
    heat = {"GPU": line("gpu_temp_c"), "drive": line("nvme_temp_c")}
    drive = {"read": line("nvme_read_gb_per_s"), "written": line("nvme_write_gb_per_s")}
    missing = [draw.paragraph(words, "dim") for words in live["missing"][:4]]
    return draw.page(
        draw.charts(
            chart("RAM in use", xs, {"": line("ram_available_bytes", ram_bytes)}, format_gib),
            chart("VRAM in use", xs, {"": line("gpu_mem_bytes")}, format_gib),
            chart("GPU", xs, {"": line("gpu_util_pct")}, draw.in_unit(" %")),
            chart("PCIe", xs, pcie, draw.rate),
            chart("Drive", xs, drive, draw.rate),
            chart("Drive queue", xs, {"": line("nvme_queue_depth")}),
            chart("Temperature", xs, heat, draw.in_unit(" °C")),
            chart("GPU power", xs, {"": line("gpu_power_w")}, draw.in_unit(" W")),
        ),
        *missing,
    )


def serving_of(live: dict[str, Any]) -> str:
    """The loaded model's server, from its own metrics; stages where a pipeline serves."""
    samples, launch = live["samples"], live["launch"]
    if len(samples) < 2:
        return ""
    xs = [round(one["time"] - samples[-1]["time"], 1) for one in samples]

    def line(key: str, by: float = 1.0) -> list[float | None]:
        return [None if one[key] is None else one[key] * by for one in samples]

    tokens = {"prompts": line("prompt_tokens_per_s"), "answers": line("answer_tokens_per_s")}
    has_link = launch.get("device") != "cpu"
    stages = [
        (f"stage {n}", ", ".join(map(str, stage["gpus"])), stage["layers"] or "shared out evenly")
        for n, stage in enumerate(launch.get("stages") or ())
    ]
    return draw.page(
        draw.heading("The loaded model"),
        draw.charts(
            chart("Answers", xs, {"being written": line("running"), "waiting": line("waiting")}),
            chart("Tokens/s", xs, tokens),
            chart("A pass", xs, {"": line("pass_s")}, draw.seconds),
            chart("Weights over the link", xs, {"": line("link_gb_per_s")}, draw.rate) if has_link else "",
            chart("Keys and values", xs, {"": line("kv_used_share", 100)}, draw.in_unit(" % used")),
            chart("Stages idle, at least", xs, {"": line("stages_idle_share", 100)}, draw.in_unit(" %")),
        ),
        draw.table(("pipeline", "GPUs", "layers"), stages) if stages else "",
    )


def facts_of(found: dict[str, Any]) -> str:
    """The computer and its links."""
    machine, profile = found["machine"], found["profile"]
    gpus = ", ".join(f"{g['name']} ({draw.amount('vram', g['memory_bytes'] or 0)})" for g in machine["gpus"]) or "none"
    wsl = ", WSL2" if machine["is_wsl2"] else ""
    rows = [
        ("System", f"{machine['os_name']}, kernel {machine['kernel'].partition('-')[0]}{wsl}"),
        ("CPU", f"{machine['cpu_name']}, {machine['cpu_cores']} cores, {machine['cpu_threads']} threads"),
        ("RAM", draw.amount("ram", machine["ram_total_bytes"])),
        ("GPU", gpus),
        ("Driver", machine["driver_version"] or "none"),
    ]
    drives = [
        (
            d["mount_point"],
            d["kind"],
            draw.amount("nvme", d["free_bytes"] or 0),
            draw.amount("nvme", d["total_bytes"] or 0),
        )
        for d in machine["drives"]
    ]
    links = (profile or {}).get("links") or {}
    measured = [(words, f"{links[name]:.1f} GB/s") for name, words in LINKS if links.get(name) is not None]
    return draw.page(
        draw.heading("This machine"),
        draw.table((), rows),
        draw.heading("Drives"),
        draw.table(("where", "kind", "free", "of"), drives, (2, 3)),
        draw.heading("Links as measured"),
        draw.table((), measured, (1,)) if measured else draw.paragraph(found["why_no_profile"], "note"),
        *(draw.paragraph(note, "dim") for note in machine["notes"][:4]),
    )


def probe_of(probe: dict[str, Any] | None) -> str:
    """Which path data takes between drive and GPU, why, and what was recommended, as gds_optimizer.py found it."""
    if not probe:
        words = f"GPUDirect Storage was never probed here: {own_command('probe')} does."
        return draw.page(draw.heading("Drive to GPU, as probed"), draw.paragraph(words, "dim"))
    settings = probe.get("settings") or {}
    rows = [
        (f"{section}.{key}", value)
        for section in ("aio", "outcore")
        for key, value in (settings.get(section) or {}).items()
        if not isinstance(value, dict)
    ]
    notes = [f"not {path}: {'; '.join(reasons)}" for path, reasons in (probe.get("why_not") or {}).items()]
    notes += [f"what would change it: {change}" for change in probe.get("would_change") or ()]
    notes += probe.get("warnings") or []
    return draw.page(
        draw.heading("Drive to GPU, as probed"),
        draw.paragraph(f"{probe.get('verdict')}: {probe.get('headline')}"),
        *(draw.paragraph(words, "dim") for words in notes[:6]),
        draw.table(("recommended", ""), rows, (1,)) if rows else "",
    )


def setup_of(found: dict[str, Any]) -> str:
    """Draw the report of set-up: what python setup.py verified."""
    setup = found["setup"]
    if not setup:
        words = f"No report of set-up: {own_command('setup')} --check writes one."
        return draw.page(draw.heading("Set-up"), draw.paragraph(words, "dim"))
    rows = [(row["part"], row["status"], row["found"]) for row in setup.get("rows", [])]
    fixes = [draw.paragraph(f"{row['part']}: {row['fix']}", "note") for row in setup.get("rows", []) if row.get("fix")]
    return draw.page(draw.heading("Set-up, as verified"), draw.table(("part", "", "what was seen"), rows), *fixes)
