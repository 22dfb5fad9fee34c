"""The panels, drawn with Gradio over the routes: a file each. A callback asks a route and draws what it says."""

from __future__ import annotations

from typing import Any

import gradio as gr

from outcore.ui.client import Client
from outcore.ui.panels.chat import ChatPanel
from outcore.ui.panels.evaluate import EvaluatePanel
from outcore.ui.panels.events import QUIET
from outcore.ui.panels.look import HEAD, theme
from outcore.ui.panels.machine import MachinePanel
from outcore.ui.panels.runs import RunsPanel
from outcore.ui.panels.train import TrainPanel


def build(client: Client, table: dict[str, Any]) -> gr.Blocks:
    """All panels. `table`: what GET /v1/fields says; the form is drawn before anyone listens there."""
    with gr.Blocks(title="outcore", analytics_enabled=False, fill_width=True) as panels:
        with gr.Tabs() as tabs:
            with gr.Tab("Train", id="train"):
                train = TrainPanel(client, table)
            with gr.Tab("Runs", id="runs"):
                runs = RunsPanel(client)
            with gr.Tab("Chat", id="chat"):
                chat = ChatPanel(client)
            with gr.Tab("Evaluate", id="evaluate"):
                evaluate = EvaluatePanel(client)
            with gr.Tab("Machine", id="machine"):
                machine = MachinePanel(client)
        begun = train.started.change(lambda name: (gr.Tabs(selected="runs"), gr.update(choices=[name], value=name)),
                                     train.started, [tabs, runs.run], **QUIET)  # fmt: skip
        begun.then(runs.refresh, runs.run, runs.outputs, **QUIET)
        panels.load(train.estimate, train.inputs, train.shown, **QUIET)
        panels.load(runs.refresh, runs.run, runs.outputs, **QUIET)
        panels.load(chat.bar.choices, None, chat.bar.model, **QUIET)
        panels.load(chat.bar.refresh, None, [chat.bar.state, chat.bar.launch], **QUIET)
        panels.load(chat.open, None, [chat.chosen, chat.chat, chat.costs, chat.links], **QUIET)
        panels.load(evaluate.choices, None, evaluate.tasks, **QUIET)
        panels.load(evaluate.refresh, None, evaluate.outputs, **QUIET)
        panels.load(machine.open, None, [machine.facts, machine.setup, *machine.limits.values()], **QUIET)
        panels.load(machine.refresh, None, machine.live, **QUIET)
        tabs.select(chat.bar.choices, None, chat.bar.model, **QUIET)
    panels.queue(default_concurrency_limit=16, api_open=False)
    return panels
