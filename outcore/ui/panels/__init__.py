"""The panels, drawn with Gradio over the routes: a file each. A callback asks a route and draws what it says."""

from __future__ import annotations

import os
import shlex
from typing import Any

import gradio as gr

from outcore.ui.client import Client
from outcore.ui.panels import draw
from outcore.ui.panels.chat import ChatPanel
from outcore.ui.panels.evaluate import EvaluatePanel
from outcore.ui.panels.events import QUIET, Notice
from outcore.ui.panels.look import HEAD, theme
from outcore.ui.panels.machine import MachinePanel
from outcore.ui.panels.runs import RunsPanel
from outcore.ui.panels.start import StartPanel
from outcore.ui.panels.train import TrainPanel


def build(client: Client, table: dict[str, Any]) -> gr.Blocks:
    """All panels. `table`: what GET /v1/fields says; the form is drawn before anyone listens there."""
    with gr.Blocks(title="outcore", analytics_enabled=False, fill_width=True) as panels:
        gr.HTML(gone_of(client), elem_id="gone")
        notice = Notice()
        with gr.Tabs() as tabs:
            with gr.Tab("Start", id="start"):
                start = StartPanel(client, notice, table["presets"])
            with gr.Tab("Train", id="train"):
                train = TrainPanel(client, notice, table)
            with gr.Tab("Runs", id="runs"):
                runs = RunsPanel(client, notice)
            with gr.Tab("Chat", id="chat"):
                chat = ChatPanel(client, notice)
            with gr.Tab("Evaluate", id="evaluate"):
                evaluate = EvaluatePanel(client, notice)
            with gr.Tab("Machine", id="machine"):
                machine = MachinePanel(client, notice)
        start.wire(tabs, train, chat)
        begun = train.started.change(lambda name: (gr.Tabs(selected="runs"), gr.update(choices=[name], value=name)),
                                     train.started, [tabs, runs.run], **QUIET)  # fmt: skip
        begun.then(runs.refresh, runs.run, runs.outputs, **QUIET)
        panels.load(train.estimate, train.inputs, train.shown, **QUIET)
        panels.load(runs.refresh, runs.run, runs.outputs, **QUIET)
        for box in (start.talk_to, chat.bar.model, evaluate.bar.model):
            gr.on([panels.load, tabs.select], chat.bar.choices, box, box, **QUIET)
        for bar in (chat.bar, evaluate.bar):
            panels.load(bar.refresh, None, bar.shown, **QUIET)
        panels.load(chat.open, None, chat.opened, **QUIET).then(chat.follow, chat.chosen, chat.drawn, **QUIET)
        panels.load(evaluate.choices, None, evaluate.tasks, **QUIET)
        panels.load(evaluate.refresh, None, evaluate.outputs, **QUIET)
        panels.load(machine.open, None, [machine.facts, machine.setup, *machine.limits.values()], **QUIET)
        panels.load(machine.refresh, None, machine.live, **QUIET)
    panels.queue(default_concurrency_limit=16, api_open=False)
    return panels


def gone_of(client: Client) -> str:
    """Make the notice that the page shows by itself while nobody answers it."""
    command = f"cd {shlex.quote(os.getcwd())} && outcore ui --port {client.base.rpartition(':')[2]}"
    words = "The panels' server does not answer. Runs go on without it, and nothing is lost. This brings it back:"
    return f'<div class="oc" role="alert">{draw.paragraph(words)}</div>{draw.command("", command)}'
