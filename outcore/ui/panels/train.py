"""The Train panel: every setting of a run, its forecast as it is typed, start."""

from __future__ import annotations

from typing import Any

import gradio as gr

from outcore.common.quantities import format_count
from outcore.ui.client import Client, ClientError
from outcore.ui.panels import draw
from outcore.ui.panels.events import QUIET, Notice, number_box
from outcore.ui.panels.labels import info_of, label_of
from outcore.ui.panels.upload import upload_button

STAGES = [
    ("as configured", ""),
    ("none: everything on the GPU", "none"),
    ("zero1: optimizer states shared out", "zero1"),
    ("zero2: gradients too", "zero2"),
    ("zero3: parameters too", "zero3"),
    ("infinity: NVMe when RAM is full", "infinity"),
]
NVME = ("nvme_offload_path", "nvme_offload_optimizer", "nvme_offload_params", "nvme_offload_gradients")
NVME_ADVANCED = ("aio_block_size", "aio_queue_depth", "pin_memory", "ram_budget_gib", "max_in_cpu_gb", "nvme_checksums")
BLOCKS = [("default", ""), *[(f"{kib // 1024} MiB" if kib >= 1024 else f"{kib} KiB", kib << 10)
                               for kib in (512, 1024, 2048, 4096)]]  # fmt: skip
DEPTHS = [("default", ""), *[(str(depth), depth) for depth in (4, 8, 16, 32)]]
GUIDE = """**Path**: a folder on the fastest drive. Linux: `/mnt/nvme/outcore`; WSL2: a folder of Linux itself such as
`~/outcore-nvme` (`/mnt/c/...` is several times slower); Windows: `D:/outcore-nvme` (C: is the system's drive).
Optimizer states go there first (12 bytes a parameter, 10 with `split`), then parameters (2 bytes), then gradients."""
GUIDE_ADVANCED = """Block size, queue depth and pinned memory are for DeepSpeed's own engine; what suits the drive
is said under its path. The streaming engine chooses by measurement."""
TIERS = ("vram", "ram", "nvme")
RECIPES: dict[str, dict[str, Any]] = {
    "Adapters (LoRA)": {"lora_r": 16, "learning_rate": 2e-4},
    "Adapters over 4 bits": {"lora_r": 16, "learning_rate": 2e-4, "quantize": "nf4"},
    "All weights": {},
    "From scratch, a first try": {"preset": "tiny", "max_steps": 150},
}
"""Settings that each recipe changes; the others' fields go back to their defaults."""


class TrainPanel:
    """Components by setting, and what their changes do."""

    def __init__(self, client: Client, notice: Notice, table: dict[str, Any]) -> None:
        self.client, self.notice = client, notice
        self.rows = {row["name"]: row for row in table["data"]}
        self.presets = table["presets"]
        self.parts: dict[str, Any] = {}
        self.started = gr.State("")
        with gr.Row():
            with gr.Column(scale=3, min_width=300):
                self._form()
            with gr.Column(scale=2, min_width=300, elem_classes="oc-side"):
                with gr.Row(elem_id="train_bar", elem_classes="oc-line"):
                    self.headline = gr.HTML(draw.said("Forecast: being made ...", "dim"), elem_id="headline")
                    self.start = gr.Button("Start training", variant="primary", min_width=120, elem_id="start_training")
                self.said = gr.HTML()
                self.banner = gr.HTML()
                self.forecast = gr.HTML()
                self.look = gr.Button("Look at the data")
                self.rows_shown = gr.HTML()
                with gr.Accordion("The same as a command line and as YAML", open=False):
                    self.command = gr.HTML(elem_id="command")
        self._wire()

    # --- what is drawn

    def _form(self) -> None:
        with gr.Row(elem_classes="oc-actions", elem_id="recipes"):
            self.recipes = {name: gr.Button(name, size="sm", min_width=120) for name in RECIPES}
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows.values():
            groups.setdefault(row["group"], []).append(row)
        for index, (title, rows) in enumerate(groups.items()):
            with gr.Accordion(title, open=index == 0):
                if any(row["name"] == "zero_stage" for row in rows):
                    self._stages()
                common = [row for row in rows if row["is_common"] and row["name"] not in self.parts]
                for row in common:
                    self._field(row)
                rest = [row for row in rows if row["name"] not in self.parts]
                if rest:
                    with gr.Accordion(f"{title}: expert settings", open=False):
                        for row in rest:
                            self._field(row)

    def _stages(self) -> None:
        self.parts["zero_stage"] = gr.Radio(
            STAGES,
            value="",
            label=label_of("zero_stage"),
            elem_id="zero_stage",
            info=info_of("zero_stage", "What each saves and costs here is below."),
        )
        self.stages = gr.HTML()
        with gr.Group(visible=False, elem_id="nvme") as self.nvme:
            gr.Markdown(GUIDE, container=True)
            self._field(self.rows["nvme_offload_path"])
            self.folder = gr.Dropdown([], label="Choose a folder", interactive=True, elem_id="choose_folder")
            self.path_said = gr.HTML()
            self.space = gr.HTML(elem_id="nvme_space")
            for name in NVME[1:]:
                self._field(self.rows[name])
            with gr.Accordion("Advanced", open=False):
                gr.Markdown(GUIDE_ADVANCED)
                for name in NVME_ADVANCED:
                    self._field(self.rows[name])

    def _field(self, row: dict[str, Any]) -> None:
        self.parts[row["name"]] = self._component(row)
        if row["name"] == "dataset":
            usual = "\n".join(row["default"])
            upload_button(self.notice, self.parts["dataset"],
                          lambda said, path: path if said in ("", usual) else f"{said}\n{path}", "upload")  # fmt: skip

    def _component(self, row: dict[str, Any]) -> Any:
        name, default, kind = row["name"], row["default"], row["kind"]
        look: dict[str, Any] = {"label": label_of(name), "info": info_of(name, row["help"]), "elem_id": f"field_{name}"}
        typed: dict[str, Any] = {"interactive": True}
        if name == "preset":
            return gr.Dropdown([("none", ""), *self.presets], value="", allow_custom_value=True, **look, **typed)
        if name in ("aio_block_size", "aio_queue_depth"):
            sizes = BLOCKS if name == "aio_block_size" else DEPTHS
            return gr.Dropdown(sizes, value="", allow_custom_value=True, **look, **typed)
        if kind == "bool" and row["is_optional"]:
            return gr.Dropdown([("default", ""), "true", "false"], value="", **look, **typed)
        if kind == "bool":
            return gr.Checkbox(value=bool(default), **look, **typed)
        if kind == "choice":
            choices = [("default", ""), *row["choices"]] if row["is_optional"] else row["choices"]
            return gr.Dropdown(choices, value="" if row["is_optional"] else default, **look, **typed)
        if kind in ("int", "float"):
            return number_box(value=default, **look)
        if kind == "list":
            return gr.Textbox(value="\n".join(default), lines=1, max_lines=6, **look, **typed)
        return gr.Textbox(value=default or "", max_lines=1, **look, **typed)

    # --- what happens

    def _wire(self) -> None:
        names, parts = list(self.parts), list(self.parts.values())

        def fields(values: tuple[Any, ...]) -> dict[str, Any]:
            found = dict(zip(names, values, strict=True))
            for name in names:
                if self.rows[name]["kind"] == "list":
                    found[name] = [line.strip() for line in str(found[name] or "").splitlines() if line.strip()]
            return found

        def estimate(*values: Any) -> tuple[Any, ...]:
            try:
                found = self.client.post("estimate", fields=fields(values))
            except ClientError as error:
                return draw.said("No forecast", "big"), draw.said(str(error), "bad"), *[""] * 4
            drawn = (headline_of(found), banner_of(found), forecast_of(found), stages_of(found), space_of(found))
            same = draw.command("Command", found["command"]) + draw.command("YAML for --config", found["yaml"])
            return *drawn, same

        shown = [self.headline, self.banner, self.forecast, self.stages, self.space, self.command]
        changes = [part.change for part in parts]
        gr.on(changes, estimate, parts, shown, trigger_mode="always_last", **QUIET)
        self.estimate, self.inputs, self.shown = estimate, parts, shown
        stage, path = self.parts["zero_stage"], self.parts["nvme_offload_path"]
        stage.change(lambda value: gr.update(visible=value == "infinity"), stage, self.nvme, **QUIET)
        gr.on([path.change, stage.change], self._path, [path, stage], [self.path_said, self.folder],
              trigger_mode="always_last", **QUIET)  # fmt: skip
        self.folder.input(lambda chosen: chosen, self.folder, path, **QUIET)

        def begin(*values: Any) -> tuple[str, str]:
            job = self.client.post("runs", fields=fields(values))
            words = f"Run {job['run']} has begun. The Runs panel shows it."
            return draw.said(words, "good"), job["run"]

        self.notice.on([self.start.click], begin, parts, [self.said, self.started])

        def look(*values: Any) -> str:
            return rows_of(self.client.post("data", "preview", fields=fields(values), rows=3))

        self.notice.on([self.look.click], look, parts, [self.rows_shown])
        touched = list(dict.fromkeys(name for recipe in RECIPES.values() for name in recipe))
        usual = {name: self.parts[name].value for name in touched}
        for name, button in self.recipes.items():
            values = [RECIPES[name].get(field, usual[field]) for field in touched]
            filled = button.click(lambda values=values: values, None, [self.parts[n] for n in touched], **QUIET)
            filled.then(estimate, parts, shown, **QUIET)  # a field in a closed part of the form says no change

    def _path(self, path: str, stage: str) -> tuple[str, Any]:
        if stage != "infinity":
            return "", gr.skip()
        try:
            folders = self.client.get("paths", "folders", path=path or "")
            base = folders["path"].rstrip("/")
            choices = [("up: " + folders["parent"], folders["parent"])]
            choices += [(f"{base}/{name}", f"{base}/{name}") for name in folders["folders"]]
            choices += [(f"drive: {one['path']} ({one['kind']})", one["path"]) for one in folders["drives"]]
            chooser = gr.update(choices=choices, value=None)
        except ClientError:
            chooser = gr.skip()
        if not path:
            return draw.said("Infinity needs a folder on a drive.", "note"), chooser
        try:
            found = self.client.post("paths", "check", path=path)
        except ClientError as error:
            return draw.said(str(error), "bad"), chooser
        kind = "bad" if not found["is_good"] else "note" if found["warning"] else "good"
        told = (draw.paragraph(found[key], "dim") for key in ("speed", "advice"))
        return draw.page(draw.paragraph(found["words"], kind), *told), chooser


def headline_of(found: dict[str, Any]) -> str:
    """The forecast in a line."""
    if found["problem"]:
        return draw.said("No forecast", "big")
    plan = found["plan"]
    if not found["fits"]:
        return draw.said("Does not fit this machine", "big")
    return draw.said(f"{draw.seconds(plan['time_s']['step_s'])} a step, {found['tokens_per_s']:,.0f} tokens/s", "big")


def banner_of(found: dict[str, Any]) -> str:
    """Draw the banner on top: what stands in the way of the run, and the smallest change that helps."""
    if found["problem"]:
        return draw.said(found["problem"], "note")
    if found["fits"]:
        return ""
    change = found["smallest_change"]
    words = found["limit"]
    more = f"Smallest change that fits: {change}" if change else "No single change that was tried makes it fit."
    return draw.page(draw.paragraph(words, "bad"), draw.paragraph(more, "note"))


def forecast_of(found: dict[str, Any]) -> str:
    """Speed, tiers, wear."""
    if found["problem"]:
        return ""
    plan = found["plan"]
    parts = dict(plan["parts_bytes"])
    parts["ram"] = {**parts["ram"], **{f"{name} (pinned)": size for name, size in parts["pinned"].items()}}
    bars = [
        draw.tier_bar(tier, parts[tier], plan["tiers"][tier]["used_bytes"], plan["tiers"][tier]["capacity_bytes"])
        for tier in TIERS
        if plan["tiers"][tier]["capacity_bytes"] or plan["tiers"][tier]["used_bytes"]
    ]
    life = found["life_steps"]
    wear = "Nothing but checkpoints is written to the drive."
    if plan["tiers"]["nvme"]["used_bytes"] and life:
        wear = f"The drive's rating lasts {life:,.0f} steps ({found['life_days']:,.0f} days of training)."
    return draw.page(
        draw.paragraph(f"{plan['model']}, {format_count(plan['params'])} parameters: {found['title']}. A forecast."),
        draw.paragraph(found["needs_infinity"], "good" if "not need" in found["needs_infinity"] else "note"),
        *bars,
        draw.paragraph(wear, "dim"),
        draw.paragraph(found["limit"], "dim") if found["fits"] else "",
        draw.paragraph(found["machine"], "dim"),
    )


def stages_of(found: dict[str, Any]) -> str:
    """Draw a table of the memory and step time of every stage on this machine."""
    if found["problem"]:
        return ""
    rows = [
        (
            name,
            *(draw.amount(tier, stage[f"{tier}_bytes"]) for tier in TIERS),
            draw.seconds(stage["step_s"]) if stage["fits"] else "short of " + ", ".join(map(str.upper, stage["short"])),
        )
        for name, stage in found["stages"].items()
    ]
    return draw.page(draw.table(("stage", "VRAM", "RAM", "drive", "a step"), rows, (1, 2, 3, 4)))


def space_of(found: dict[str, Any]) -> str:
    """Write what would lie on the drive, and the space that it needs."""
    if found["problem"]:
        return ""
    told = found["offloaded"]
    parts = [f"{name} {draw.amount('nvme', size)}" for name, size in told["parts_bytes"].items() if size]
    needed, free = (draw.amount("nvme", told[key]) for key in ("needed_bytes", "free_bytes"))
    words = f"On the drive: {', '.join(parts) or 'nothing'}. Space needed, with reserve: {needed}; free: {free}."
    is_short = told["needed_bytes"] > told["free_bytes"]
    return draw.page(draw.heading("Offloaded to NVMe"), draw.paragraph(words, "bad" if is_short else ""))


def rows_of(found: dict[str, Any]) -> str:
    """Rows with their loss mask."""
    parts = [draw.heading("Rows as the run reads them"), *(draw.paragraph(line, "dim") for line in found["lines"])]
    parts.append("<p><mark>Marked text</mark> bears loss: the model learns to write it.</p>")
    for row in found["rows"]:
        pieces = "".join(
            f"<mark>{draw.text(p['text'])}</mark>" if p["loss"] else draw.text(p["text"]) for p in row["pieces"]
        )
        cut = f" [... {row['cut_tokens']:,} tokens more]" if row["cut_tokens"] else ""
        parts.append(f"<h3>{draw.text(row['heading'])}</h3><pre tabindex=0>{pieces}{cut}</pre>")
    return draw.page(*parts)
