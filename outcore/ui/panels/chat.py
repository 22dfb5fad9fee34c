"""The Chat panel: conversations that are kept, answered word by word."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import gradio as gr

from outcore.ui.client import Client, ClientError
from outcore.ui.panels import draw
from outcore.ui.panels.events import QUIET, SHOWN, number_box, number_in, telling
from outcore.ui.panels.model import ModelBar
from outcore.ui.panels.script import EDIT

SAMPLING = (
    ("temperature", "0: the likeliest token each time"),
    ("top_p", "draw among the fewest tokens of this probability"),
    ("top_k", "draw among so many likeliest tokens"),
    ("max_tokens", "the answer ends after so many; empty: 4,096, or what the context leaves"),
    ("repetition_penalty", "above 1: fewer repetitions"),
    ("seed", "same seed, same text"),
)
EMPTY = draw.said("Load a model, then ask something.", "dim")
DRAW_EVERY_S = 0.2
"""A page that draws every word of a fast model has no time left for the button that stops it."""
STOP_S = 10.0
"""How long a stopped answer may take to end before it is shown as it is."""


class ChatPanel:
    """One conversation at a time."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.bar = ModelBar(client)
        with gr.Row():
            self.chosen = gr.Dropdown([], label="Conversation", interactive=True, scale=3, min_width=240,
                                      elem_id="conversation")  # fmt: skip
            self.new = gr.Button("New", scale=1, min_width=90, elem_id="new_conversation")
            self.delete = gr.Button("Delete", scale=1, min_width=90)
        self.chat = gr.HTML(EMPTY, js_on_load=EDIT, autoscroll=True, elem_id="chat")
        self.costs = gr.HTML(elem_id="timings")
        self.text = gr.Textbox(
            label="Message", placeholder="Enter sends, Shift+Enter begins a line", max_lines=8, elem_id="message"
        )
        with gr.Row(elem_classes="oc-actions"):
            self.send = gr.Button("Send", variant="primary", elem_id="send")
            self.halt = gr.Button("Stop", variant="stop", elem_id="stop_answer")
            self.again = gr.Button("Answer again", elem_id="again")
        with gr.Accordion("System prompt, sampling", open=False):
            self.system = gr.Textbox(label="System prompt", info="who the model is told to be", lines=2)
            with gr.Row():
                self.sampling = {name: number_box(name, words, min_width=140) for name, words in SAMPLING}
        self.links = gr.HTML()
        self._wire()

    def _wire(self) -> None:
        settings = [self.system, *self.sampling.values()]
        shown = [self.chat, self.costs, self.text, self.chosen]
        asked = [self.chosen, self.text, *settings]
        sent = gr.on([self.send.click, self.text.submit], self._send, asked, shown, **SHOWN)
        again = self.again.click(self._again, [self.chosen, *settings], shown, **SHOWN)
        edited = self.chat.edit(self._edit, [self.chosen, *settings], shown, **SHOWN)
        stopped = self.halt.click(None, None, None, cancels=[sent, again, edited], api_visibility="private")
        stopped.then(self._after_stop, self.chosen, [self.chat, self.costs, self.links, self.system], **QUIET)
        self.chosen.input(self.show, self.chosen, [self.chat, self.costs, self.links, self.system], **QUIET)
        for event in (sent, again, edited):
            event.then(self._links, self.chosen, self.links, **QUIET)
        opened = [self.chosen, self.chat, self.costs, self.links]
        self.new.click(telling(self._new), settings, opened, **SHOWN)
        self.delete.click(telling(self._delete), self.chosen, opened, **SHOWN)

    def open(self) -> tuple[Any, ...]:
        """The latest conversation, also after the page was loaded anew in the middle of an answer."""
        try:
            names = self._names()
        except ClientError as error:
            return gr.skip(), gr.skip(), draw.said(str(error), "bad"), ""
        name = names[0][1] if names else None
        chat, costs, links, _ = self.show(name)
        return gr.update(choices=names, value=name), chat, costs, links

    def show(self, name: str | None) -> tuple[Any, ...]:
        """A conversation as it is kept."""
        if not name:
            return EMPTY, "", "", gr.skip()
        try:
            one = self.client.get("conversations", name)
        except ClientError as error:
            return EMPTY, draw.said(str(error), "bad"), "", gr.skip()
        last = one["messages"][-1] if one["messages"] else {}
        return messages_of(one["messages"]), costs_of(last), self._links(name), one["system"]

    # --- events

    def _after_stop(self, name: str | None) -> tuple[Any, ...]:
        """The conversation with what the answer cost: the server notices at its next piece that nobody listens."""
        until_s = time.monotonic() + STOP_S
        with contextlib.suppress(ClientError):  # `show` tells it
            while name and self.client.get("conversations", name)["is_under_way"] and time.monotonic() < until_s:
                time.sleep(0.05)
        return self.show(name)

    def _send(self, name: str | None, text: str, *settings: Any) -> Iterator[tuple[Any, ...]]:
        yield from self._answer(name, {"text": text}, settings)

    def _again(self, name: str | None, *settings: Any) -> Iterator[tuple[Any, ...]]:
        yield from self._answer(name, {"regenerate": True}, settings)

    def _edit(self, edited: gr.EditData, name: str | None, *settings: Any) -> Iterator[tuple[Any, ...]]:
        yield from self._answer(name, {"text": edited.value, "at": edited.index}, settings)

    def _answer(self, name: str | None, what: dict[str, Any], settings: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        try:
            told = self._told(settings)
            chosen = name or self.client.post("conversations", **told)["id"]
            if name:
                self.client.patch("conversations", name, **told)
            kept: list[dict[str, Any]] = []
            drawn_s = 0.0
            for event in self.client.events("conversations", chosen, "answer", **what):
                names = gr.skip()
                if not kept:  # the user's message is kept now; the answer that is being written may be, too
                    kept = self.client.get("conversations", chosen)["messages"]
                    kept = kept[:-1] if kept[-1]["role"] == "assistant" else kept
                    names = gr.update(choices=self._names(), value=chosen)
                if event["event"] == "error":
                    yield messages_of(kept), draw.said(event["message"], "bad"), gr.skip(), names
                    return
                if event["event"] == "piece" and time.monotonic() - drawn_s < DRAW_EVERY_S:
                    continue
                drawn_s = time.monotonic()
                message = event.get("message") or {"role": "assistant", **event}
                yield messages_of([*kept, message]), costs_of(message), "" if "text" in what else gr.skip(), names
        except ClientError as error:
            raise gr.Error(draw.text(error), duration=30, title="Not answered", print_exception=False) from error

    def _new(self, *settings: Any) -> tuple[Any, ...]:
        name = self.client.post("conversations", **self._told(settings))["id"]
        return gr.update(choices=self._names(), value=name), EMPTY, "", ""

    def _delete(self, name: str | None) -> tuple[Any, ...]:
        if not name:
            raise ClientError("There is no conversation to delete.")
        self.client.delete("conversations", name)
        return self.open()

    def _links(self, name: str | None) -> str:
        if not name:
            return ""
        base = f"/v1/conversations/{name}/export"
        return draw.page(
            f'<p>Keep it: <a href="{base}?format=md" download>Markdown</a> or '
            f'<a href="{base}?format=json" download>JSON</a>, which can be trained on.</p>'
        )

    def _told(self, settings: tuple[Any, ...]) -> dict[str, Any]:
        system, *numbers = settings
        sampling = {name: number_in(name, text) for name, text in zip(self.sampling, numbers, strict=True)}
        return {"system": system or "", "sampling": sampling}

    def _names(self) -> list[tuple[str, str]]:
        found = self.client.get("conversations")["data"]
        return [(one["title"] or f"new ({one['id'][-4:]})", one["id"]) for one in found]


def messages_of(messages: list[dict[str, Any]]) -> str:
    """A conversation; what the model wrote is Markdown, what the user wrote stays as it is. Reasoning is folded."""
    return draw.page(*(_message(index, one) for index, one in enumerate(messages))) if messages else EMPTY


def _message(index: int, one: dict[str, Any]) -> str:
    content = one.get("content") or ""
    if one["role"] == "user":
        body = f'<div class="text">{draw.text(content)}</div><button type="button" class="oc-edit">Edit</button>'
    else:
        reasoning = draw.markdown(one.get("reasoning") or "")
        folded = f"<details><summary>Reasoning</summary>{reasoning}</details>" if reasoning else ""
        body = f'<div class="md">{folded}{draw.markdown(content)}</div>'
    return f'<article class="{draw.text(one["role"])}" data-index="{index}">{body}{draw.copy_button(content)}</article>'


def costs_of(message: dict[str, Any]) -> str:
    """What an answer cost, in a line."""
    times = message.get("timings")
    if not times:
        return ""
    words = [f"{times['tokens']} tokens"]
    if times["tokens_per_s"]:
        words.append(f"{times['tokens_per_s']:.1f} tokens/s")
    if times["prefill_s"] is not None:
        words.append(f"first word after {draw.seconds(times['prefill_s'])}, then {draw.seconds(times['decode_s'])}")
    if times["hit_rate"] is not None:
        words.append(f"{times['hit_rate']:.0%} of {times['prompt_tokens']} prompt tokens known from before")
    words += residency_of(times)
    ends = {"cancelled": "stopped", "length": "ended at max_tokens", "error": "broken off"}
    if message.get("finish") in ends:
        words.append(ends[message["finish"]])
    return draw.said("; ".join(words), "dim")


def residency_of(times: dict[str, Any]) -> list[str]:
    """Words for where weights live and how full the room for keys and values is."""
    weights = {home: size for home, size in (times.get("weight_bytes") or {}).items() if size}
    homes = [f"{draw.amount(home, size)} in {draw.TIER_NAMES[home]}" for home, size in weights.items()]
    found = [f"weights {', '.join(homes)}"] if homes else []
    if times.get("kv_used_share") is not None:
        found.append(f"keys and values {times['kv_used_share']:.0%} of {draw.amount('ram', times['kv_bytes'])} used")
    return found
