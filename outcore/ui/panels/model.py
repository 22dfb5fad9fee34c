"""The bar that loads a model, with its expert drawer and launch descriptor; Chat and Evaluate work with it."""

from __future__ import annotations

import json
from typing import Any

import gradio as gr

from outcore.ui.client import Client, ClientError
from outcore.ui.panels import draw
from outcore.ui.panels.events import QUIET, SHOWN, number_box, number_in, telling

REFRESH_S = 1.5
PRESETS = [("Balanced", "balanced"), ("Latency", "latency"), ("Throughput", "throughput")]
NUMBERS = (
    ("tensor_parallel", 1, "GPUs that share each layer; above 1 vLLM serves, all weights in VRAM"),
    ("pipeline_parallel", 1, "stages of layers, a group of GPUs each; above 1 vLLM serves"),
    ("context", None, "tokens of prompt and answer together"),
    ("max_sequences", None, "answers written at the same time"),
    ("kv_gib", None, "room for keys and values, GiB"),
    ("vram_gib", None, "device memory to stay within, GiB"),
    ("ram_gib", None, "RAM for weights, keys and values, GiB"),
    ("num_layer_buffers", None, "travelling layers on the device at a time; empty: 3"),
    ("cpu_tokens", None, "tokens up to which the CPU multiplies weights in RAM as they are; 0: never"),
    ("draft_tokens", None, "guessed tokens of a pass; 0: none"),
)
CHOICES = (
    ("precision", ("auto", "bf16", "fp16", "fp32")),
    ("kv_home", ("auto", "vram", "ram", "nvme")),
    ("kv_format", ("same", "int8")),
    ("compile", ("auto", "on", "off")),
)


class ModelBar:
    """Choose, load, stop; says how far it is."""

    def __init__(self, client: Client) -> None:
        self.client = client
        with gr.Row():
            self.model = gr.Dropdown(
                [], label="Model", info="a run, a folder or a hub id", allow_custom_value=True, interactive=True,
                scale=3, min_width=240, elem_id="model",
            )  # fmt: skip
            self.preset = gr.Radio(
                PRESETS, value="latency", label="Aim", info="latency: one reader", scale=2, min_width=240
            )
        with gr.Row(elem_classes="oc-actions"):
            self.load = gr.Button("Load", variant="primary", elem_id="load_model")
            self.unload = gr.Button("Stop or unload", elem_id="unload_model")
        with gr.Accordion("Expert: placement, parallelism, keys and values", open=False):
            self.expert: dict[str, Any] = {}
            with gr.Row():
                for name, default, words in NUMBERS:
                    self.expert[name] = number_box(name, words, default, min_width=150)
                for name, choices in CHOICES:
                    self.expert[name] = gr.Dropdown(choices, value=choices[0], label=name, min_width=150)
                self.expert["nvme_path"] = gr.Textbox(
                    "", label="nvme_path", info="folder for weights that RAM does not hold", min_width=150
                )
            self.launch = gr.Code(label="Launch descriptor", language="json", interactive=False, lines=3)
        self.state = gr.HTML(elem_id="model_state")
        self.timer = gr.Timer(REFRESH_S)
        self.timer.tick(self.refresh, None, [self.state, self.launch], **QUIET)
        inputs = [self.model, self.preset, *self.expert.values()]
        self.load.click(telling(self._load), inputs, [self.state, self.launch], **SHOWN)
        self.unload.click(telling(self._unload), None, [self.state, self.launch], **SHOWN)

    def choices(self) -> Any:
        """Runs of this folder that have a model."""
        try:
            runs = self.client.get("runs")["data"]
            state = self.client.get("model")
        except ClientError:
            return gr.skip()
        found = [row["model"] for row in runs if row["model"]]
        loaded = state.get("model") if state["state"] in ("ready", "loading") else None
        return gr.update(choices=found, value=loaded or (found[0] if found else None))

    def refresh(self) -> tuple[Any, Any]:
        """How far loading is."""
        try:
            state = self.client.get("model")
        except ClientError as error:
            return draw.said(str(error), "bad"), gr.skip()
        launch = {key: state[key] for key in ("command", "settings", "launch") if key in state}
        return model_state_of(state), json.dumps(launch, indent=1) if launch else ""

    def _load(self, model: str | None, preset: str, *expert: Any) -> tuple[Any, Any]:
        numbers = {name for name, _, _ in NUMBERS}
        given = {
            name: number_in(name, value) if name in numbers else value
            for name, value in zip(self.expert, expert, strict=True)
        }
        usual = {name: choices[0] for name, choices in CHOICES}
        given = {name: value for name, value in given.items() if value not in (None, "", usual.get(name))}
        if all(given.get(name, 1) == 1 for name in ("tensor_parallel", "pipeline_parallel")):  # vLLM has no aims
            given["preset"] = preset
        self.client.post("model", model=model or "", **given)
        return self.refresh()

    def _unload(self) -> tuple[Any, Any]:
        self.client.delete("model")
        return self.refresh()


def model_state_of(state: dict[str, Any]) -> str:
    """State in words; while it loads the last lines that it said."""
    kind = state["state"]
    if kind in ("none", "stopped"):
        return draw.said("No model is loaded.", "dim")
    if kind == "failed":
        return draw.said(f"{state['model']} is not there: {state['message']}", "bad")
    if kind == "loading":
        words = f"Loading {state['model']}: {draw.seconds(state['seconds'])} so far."
        return draw.page(draw.paragraph(words, "note"), draw.console(state["lines"][-4:]))
    launch = state.get("launch") or {}
    return draw.page(
        draw.paragraph(f"{state['model']} is loaded ({draw.seconds(state['seconds'])}).", "good"),
        draw.paragraph(launch_words(launch), "dim"),
        *(draw.paragraph(line, "dim") for line in launch.get("placement", [])[:3]),
    )


def launch_words(launch: dict[str, Any]) -> str:
    """The launch descriptor in a line."""
    if "zero" not in launch:
        return launch.get("problem", "")
    zero = launch["zero"]
    kept_as = "in the weights' type" if launch["kv_format"] == "same" else launch["kv_format"]
    homes = {"none": "stay on the device", "cpu": "stream from RAM", "nvme": "stream from the drive"}
    return (
        f"Launch: {launch.get('engine', 'outcore')}, {launch['world_size']} process(es), tensor parallel "
        f"{launch['tensor_parallel']}, pipeline parallel {launch['pipeline_parallel']}; ZeRO stage {zero['stage']}, "
        f"weights {homes[zero['offload_param']]}, {zero['num_buffers']} buffers; {launch['precision']} on "
        f"{launch['device_name'] or launch['device']}; "
        f"keys and values in {launch['kv_home'].upper()}, {kept_as}."
    )
