"""The bar that loads a model, with its expert drawer and launch descriptor; Chat and Evaluate have one each."""

from __future__ import annotations

import json
from typing import Any

import gradio as gr

from outcore.ui.client import Client, ClientError
from outcore.ui.panels import draw
from outcore.ui.panels.events import QUIET, Notice, number_box, number_in
from outcore.ui.panels.labels import KINDS, info_of, label_of
from outcore.ui.settings import ONE_READER

REFRESH_S = 1.5
PRESETS = [
    ("one reader (latency)", ONE_READER), ("a few (balanced)", "balanced"), ("many (throughput)", "throughput"),
    ("as the engine does", ""),
]  # fmt: skip
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
    """Choose, load, unload; says in a line how far it is. `prefix` of the names in the page, one for each bar."""

    def __init__(self, client: Client, notice: Notice, prefix: str = "", preset: str = ONE_READER) -> None:
        self.client = client
        with gr.Row(elem_classes="oc-line"):
            self.model = gr.Dropdown(
                [], label="Model", allow_custom_value=True, interactive=True,
                scale=4, min_width=160, elem_id=f"{prefix}model",
            )  # fmt: skip
            self.load = gr.Button("Load", scale=1, min_width=70, elem_id=f"{prefix}load_model")
            self.unload = gr.Button("Unload", scale=1, min_width=70, elem_id=f"{prefix}unload_model")
        self.state = gr.HTML(elem_id=f"{prefix}model_state")
        with gr.Accordion("How the model is loaded", open=False):
            self.preset = gr.Radio(PRESETS, value=preset, label="Who reads the answers")
            self.expert: dict[str, Any] = {}
            with gr.Row():
                for name, default, words in NUMBERS:
                    self.expert[name] = number_box(label_of(name), info_of(name, words), default, min_width=150)
                for name, choices in CHOICES:
                    self.expert[name] = gr.Dropdown(
                        choices, value=choices[0], label=label_of(name), info=info_of(name, ""), min_width=150
                    )
                self.expert["nvme_path"] = gr.Textbox(
                    "",
                    label=label_of("nvme_path"),
                    info=info_of("nvme_path", "those that RAM does not hold"),
                    min_width=150,
                )
            self.launch = gr.HTML(elem_id=f"{prefix}launch")
        self.shown = [self.state, self.launch]
        gr.Timer(REFRESH_S).tick(self.refresh, None, self.shown, **QUIET)
        notice.on([self.load.click], self._load, [self.model, self.preset, *self.expert.values()], self.shown)
        notice.on([self.unload.click], self._unload, None, self.shown)

    def choices(self, chosen: str | None) -> Any:
        """The last model, those in this folder, and the runs of it that have one."""
        try:
            last = [self.client.get("model").get("model")]
            here = self.client.get("paths", "folders", path="")["models"]
            runs = [row["model"] for row in self.client.get("runs")["data"]]
        except ClientError:
            return gr.skip()
        found = list(dict.fromkeys(model for model in [*last, *here, *runs] if model))
        return gr.update(choices=found, value=chosen or next(iter(found), None))

    def refresh(self) -> tuple[Any, Any]:
        """Show how far loading is."""
        try:
            state = self.client.get("model")
        except ClientError as error:
            return draw.said(str(error), "bad"), gr.skip()
        return model_state_of(state), launch_of(state)

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
    """The last model and its state in a line."""
    kind, model = state["state"], state.get("model")
    if kind in ("none", "stopped"):
        return draw.said(
            f"{model} is not loaded." if model else f"No model is loaded. Choose one, or type {KINDS}.", "dim"
        )
    if kind == "failed":
        return draw.said(f"{model} is not loaded: {state['message']}", "bad")
    if kind == "loading":
        latest = f" {state['lines'][-1]}" if state["lines"] else ""
        return draw.said(f"Loading {model}: {draw.seconds(state['seconds'])} so far.{latest}", "note")
    return draw.said(f"{model} is loaded ({draw.seconds(state['seconds'])}).", "good")


def launch_of(state: dict[str, Any]) -> str:
    """Draw the layout of the loaded model in a few lines; its whole descriptor to copy."""
    launch = state.get("launch") or {}
    if not launch:
        return ""
    words = [launch_words(launch), *launch.get("placement", [])[:3]]
    whole = {key: state[key] for key in ("settings", "launch") if key in state}
    return draw.page(*(draw.paragraph(line, "dim") for line in words)) + draw.command(
        "Command and launch descriptor", f"{state['command']}\n{json.dumps(whole, indent=1)}"
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
