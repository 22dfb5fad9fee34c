"""The first page: three ways to begin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from outcore.ui.client import Client, ClientError
from outcore.ui.panels import draw
from outcore.ui.panels.chat import ChatPanel
from outcore.ui.panels.events import QUIET, Notice
from outcore.ui.panels.labels import KINDS
from outcore.ui.panels.train import TrainPanel, banner_of, forecast_of, headline_of
from outcore.ui.panels.upload import upload_button
from outcore.ui.settings import ONE_READER


class StartPanel:
    """Talk to a model, teach it your data, or ask whether it fits. The other panels do the work."""

    def __init__(self, client: Client, notice: Notice, presets: list[str]) -> None:
        self.client, self.notice, self.presets = client, notice, presets
        with gr.Row(equal_height=False):
            with gr.Column(min_width=280, elem_classes="oc-path"):
                gr.HTML(draw.page(draw.heading("Talk to a model"), draw.paragraph("Load it and ask it something.")))
                self.talk_to = gr.Dropdown([], label="Model", info=f"a run of yours, {KINDS}", allow_custom_value=True,
                                           interactive=True, elem_id="start_model")  # fmt: skip
                self.talk = gr.Button("Load and chat", variant="primary", elem_id="start_talk")
            with gr.Column(min_width=280, elem_classes="oc-path"):
                gr.HTML(draw.page(draw.heading("Teach it my data"), draw.paragraph("Fine-tune a model on your files.")))
                self.base = gr.Textbox(label="Model", info=KINDS, max_lines=1, elem_id="start_base")
                where = ".jsonl, .csv, .parquet or .txt file or a folder, below the panels' folder, or a hub id"
                self.data = gr.Textbox(label="Data", info=where, max_lines=1, elem_id="start_data")
                upload_button(notice, self.data, lambda said, path: path, "start_upload")
                self.teach = gr.Button("Set up the training", variant="primary", elem_id="start_teach")
            with gr.Column(min_width=280, elem_classes="oc-path"):
                gr.HTML(draw.page(draw.heading("Will it fit?"), draw.paragraph("Forecast a training on this machine.")))
                self.asked = gr.Dropdown(presets, value=presets[0], label="Model", info=f"a known shape, {KINDS}",
                                         allow_custom_value=True, interactive=True, elem_id="start_asked")  # fmt: skip
                self.fits = gr.Button("Forecast", variant="primary", elem_id="start_fits")
                self.forecast = gr.HTML(elem_id="start_forecast")

    def wire(self, tabs: gr.Tabs, train: TrainPanel, chat: ChatPanel) -> None:
        """Lead into the other panels."""
        self.notice.on([self.talk.click], self._talk, self.talk_to, [tabs, chat.bar.model])
        filled = [tabs, train.parts["model_name_or_path"], train.parts["dataset"]]
        taught = self.notice.on([self.teach.click], self._teach, [self.base, self.data], filled)
        taught.then(train.estimate, train.inputs, train.shown, **QUIET)
        self.notice.on([self.fits.click], self._fits, self.asked, [self.forecast], refused=("",))

    def _talk(self, model: str | None) -> tuple[Any, Any]:
        self.client.post("model", model=model or "", preset=ONE_READER)
        return gr.Tabs(selected="chat"), model

    def _teach(self, base: str, data: str) -> tuple[Any, ...]:
        if not base.strip() or not data.strip():
            raise ClientError("Name both first: the model that is taught, and the data that it is taught with.")
        return gr.Tabs(selected="train"), base, data

    def _fits(self, model: str | None) -> Iterator[str]:
        yield ""  # the forecast of another one
        if not model:
            raise ClientError("Name a model first.")
        found = self.client.post(
            "estimate", fields={"preset" if model in self.presets else "model_name_or_path": model}
        )
        yield headline_of(found) + banner_of(found) + forecast_of(found)
