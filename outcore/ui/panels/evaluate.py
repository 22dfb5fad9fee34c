"""The Evaluate panel: tasks on the loaded model, progress, history, comparison."""

from __future__ import annotations

import json
import time
from typing import Any

import gradio as gr

from outcore.common.quantities import counted
from outcore.ui.client import Client, ClientError
from outcore.ui.panels import draw
from outcore.ui.panels.events import QUIET, Notice, number_box, number_in
from outcore.ui.panels.model import ModelBar

REFRESH_S = 2.0
SHOWN_CHARS = 600
"""Letters shown of a question (its end) and of an answer (its beginning)."""


class EvaluatePanel:
    """Panel of evaluations: what to ask, how far it is, what came of it."""

    def __init__(self, client: Client, notice: Notice) -> None:
        self.client = client
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                self.bar = ModelBar(client, notice, "evaluated_", preset="throughput")
                self.tasks = gr.Dropdown(
                    [], label="Tasks", multiselect=True, allow_custom_value=True, interactive=True, elem_id="tasks",
                    info="outcore_... work without a network; names of lm-evaluation-harness may be typed",
                )  # fmt: skip
                with gr.Row():
                    self.limit = number_box(
                        "Documents of each", "below 1: a share; empty: all `limit`", min_width=140, elem_id="limit"
                    )
                    self.shots = number_box(
                        "Examples before", "solved in the prompt; empty: as the task says `num_fewshot`", min_width=140
                    )
                self.template = gr.Checkbox(
                    False, label="Ask through the chat template", info="for models that chat `apply_chat_template`"
                )
                with gr.Row(elem_classes="oc-actions"):
                    self.start = gr.Button("Evaluate", variant="primary", elem_id="start_evaluation")
                    self.cancel = gr.Button("Cancel", elem_id="cancel_evaluation")
                    self.resume = gr.Button("Go on", elem_id="resume_evaluation")
                self.said = gr.HTML()
                self.progress = gr.HTML(elem_id="evaluation_progress")
            with gr.Column(scale=3, min_width=300):
                self.history = gr.HTML(elem_id="history")
                self.chosen = gr.Dropdown([], label="Look at one, or compare two", multiselect=True, interactive=True,
                                          elem_id="evaluations")  # fmt: skip
                self.detail = gr.HTML()
        self.timer = gr.Timer(REFRESH_S)
        self.outputs = [self.progress, self.history, self.chosen]
        self.timer.tick(self.refresh, None, self.outputs, **QUIET)
        asked = [self.tasks, self.limit, self.shots, self.template]
        notice.on([self.start.click], self._start, asked, [self.said])
        notice.on([self.cancel.click], self._cancel, None, [self.said])
        notice.on([self.resume.click], self._resume, self.chosen, [self.said])
        notice.on([self.chosen.change], self._look, self.chosen, [self.detail], **QUIET)

    def choices(self) -> Any:
        """Names of tasks, ours first."""
        try:
            found = self.client.get("evaluation_tasks", limit=200)["data"]
        except ClientError:
            return gr.skip()
        return gr.update(choices=[(f"{one['name']}: {one['words']}" if one["words"] else one["name"], one["name"])
                                  for one in found])  # fmt: skip

    def refresh(self) -> tuple[Any, ...]:
        """Progress of what runs, history."""
        try:
            records = self.client.get("evaluations")["data"]
        except ClientError as error:
            return draw.said(str(error), "bad"), gr.skip(), gr.skip()
        names = [(f"{one['id'][-6:]}  {', '.join(one['tasks'])}  {_when(one)}", one["id"]) for one in records]
        return progress_of(records), history_of(records), gr.update(choices=names)

    def _start(self, tasks: list[str], limit: str, shots: str, template: bool) -> str:
        found = self.client.post(
            "evaluations",
            tasks=tasks or [],
            limit=number_in("Documents of each", limit),
            num_fewshot=number_in("Examples before", shots),
            apply_chat_template=bool(template),
        )
        return draw.said(f"{found['id']} has begun.", "good")

    def _cancel(self) -> str:
        running = [one for one in self.client.get("evaluations")["data"] if one["status"] in ("queued", "running")]
        if not running:
            raise ClientError("No evaluation is under way.")
        self.client.post("evaluations", running[0]["id"], "cancel")
        return draw.said(f"{running[0]['id']} ends; what was answered is kept.", "good")

    def _resume(self, names: list[str]) -> str:
        if len(names or []) != 1:
            raise ClientError("Choose the one evaluation to go on with, in the list of the history.")
        self.client.post("evaluations", names[0], "resume")
        return draw.said(f"{names[0]} goes on.", "good")

    def _look(self, names: list[str]) -> str:
        if not names:
            return ""
        if len(names) == 1:
            return detail_of(
                self.client.get("evaluations", names[0]), self.client.get("evaluations", names[0], "samples", limit=3)
            )
        return diff_of(self.client.get("evaluations", names[0], "diff", names[1]), names)


def _when(record: dict[str, Any]) -> str:
    at = record["completed_at"] or record["started_at"] or record["created_at"]
    return time.strftime("%d %b %H:%M", time.localtime(at)) if at else ""


def progress_of(records: list[dict[str, Any]]) -> str:
    """The evaluation under way, if any."""
    running = [one for one in records if one["status"] in ("queued", "running")]
    if not running:
        is_failed = records and records[0]["status"] == "failed"
        return draw.said(f"{records[0]['id']} failed: {records[0]['error']}", "bad") if is_failed else ""
    parts = []
    for one in running[:3]:
        now = one["progress"]
        share = now["documents_done"] / now["documents"] if now["documents"] else 0.0
        left = f", {draw.seconds(now['left_s'])} left" if now["left_s"] else ""
        words = f"{now['task'] or ', '.join(one['tasks'])}: {now['stage']}"
        if now["documents"]:
            words += f", {now['documents_done']:,} of {counted(now['documents'], 'document')}{left}"
        parts.append(draw.fill_bar(share, words))
    return draw.page(draw.heading("Under way"), *parts)


def history_of(records: list[dict[str, Any]]) -> str:
    """Every evaluation with its scores."""
    if not records:
        return draw.said("Nothing was evaluated yet.", "dim")
    rows = []
    for one in records[:40]:
        scores = ", ".join(f"{s['metric']} {draw.number(float(s['value']), 4)}" for s in one["scores"][:4])
        rows.append((one["id"][-6:], ", ".join(one["tasks"]), scores or one["status"], one["model"], _when(one)))
    return draw.page(draw.heading("History"), draw.table(("id", "tasks", "scores", "model", "when"), rows))


def detail_of(record: dict[str, Any], samples: dict[str, Any]) -> str:
    """One evaluation: scores, settings, launch, some documents, files to keep."""
    scores = [
        (s["task"], s["metric"], draw.number(float(s["value"]), 4), draw.number(s["stderr"]), s["documents"])
        for s in record["scores"]
    ]
    base = f"/v1/evaluations/{record['id']}/export"
    facts = {"settings": record["settings"], "launch": record["launch"], "versions": record["versions"]}
    return draw.page(
        draw.heading(f"{record['id']}: {record['status']}"),
        draw.paragraph(record["error"] or "", "bad"),
        draw.table(("task", "metric", "value", "±", "documents"), scores, (2, 3, 4)),
        f'<p>Keep it: <a href="{base}?format=json" download>JSON with samples</a>, '
        f'<a href="{base}?format=csv" download>CSV</a></p>',
        draw.heading(f"Some of {counted(samples['total'], 'document')}") if samples["data"] else "",
        *map(document_of, samples["data"]),
        f"<details><summary>Exact settings, launch descriptor</summary>{_as_json(facts)}</details>",
    )


def document_of(one: dict[str, Any]) -> str:
    """A question, what was wanted, what the model made of it."""
    got = ", ".join(f"{name} {draw.number(v) if isinstance(v, float) else v}" for name, v in one["metrics"].items())
    if one["continuations"]:
        head, numbers = ("wanted", "how it may go on", "log-probability"), (2,)
        rows = [
            ("▸" if number == one["target"] else "", words, draw.number(answer[0], 5))
            for number, (words, answer) in enumerate(zip(one["continuations"], one["answers"]))
        ]
    else:
        head, numbers = ("wanted", "answered"), ()
        said = [part for answer in one["answers"] for part in ([answer] if isinstance(answer, str) else answer)]
        words = [part if isinstance(part, str) else f"log-probability {draw.number(part, 5)}" for part in said]
        rows = [(str(one["target"])[:SHOWN_CHARS], part[:SHOWN_CHARS]) for part in words]
    return (
        draw.paragraph(f"{one['task']}, document {one['doc_id']}: {got}", "dim")
        + draw.console([one["prompt"][-SHOWN_CHARS:]])
        + draw.table(head, rows, numbers)
    )


def _as_json(value: Any) -> str:
    return f"<pre tabindex=0>{draw.text(json.dumps(value, indent=1, ensure_ascii=False)[:6000])}</pre>"


def diff_of(found: dict[str, Any], names: list[str]) -> str:
    """Two evaluations side by side."""
    return draw.page(draw.heading(f"{names[0][-6:]} and {names[1][-6:]}"), _as_json(found))
