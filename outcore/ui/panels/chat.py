"""The Chat panel: conversations that are kept, answered word by word."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import gradio as gr

from outcore.ui.client import Client, ClientError
from outcore.ui.panels import draw
from outcore.ui.panels.events import QUIET, Notice, number_box, number_in
from outcore.ui.panels.labels import info_of, label_of
from outcore.ui.panels.model import ModelBar
from outcore.ui.panels.script import EDIT

SAMPLING = (
    ("temperature", "0: the likeliest token each time; empty: as the model says, else 1"),
    ("top_p", "draw among the fewest tokens of this probability"),
    ("top_k", "draw among so many likeliest tokens"),
    ("max_tokens", "the answer ends after so many; empty: 4,096, or what the context leaves"),
    ("repetition_penalty", "above 1: fewer repetitions"),
    ("seed", "same seed, same text"),
)
EMPTY = draw.said("Ask something. The loaded model answers.", "dim")
UNSET = (gr.skip(),) * (1 + len(SAMPLING))
"""The message and the sampling stay as they are."""
DRAW_EVERY_S, DRAWN_CHARS = 0.2, 2000
"""A page that draws every word of a fast model has no time left for the button that stops it; an answer of more letters
than these is drawn so much more seldom."""
STOP_WITHIN_S = 3.0
"""Seconds that a Stop waits for an answer that was asked for and has not begun."""


class ChatPanel:
    """Conversations, and the one that is open."""

    def __init__(self, client: Client, notice: Notice) -> None:
        self.client, self.notice = client, notice
        with gr.Row(elem_id="talk"):
            with gr.Column(scale=1, min_width=220, elem_id="conversations"):
                with gr.Row():
                    self.new = gr.Button("New", min_width=70, elem_id="new_conversation")
                    self.delete = gr.Button("Delete ...", variant="stop", min_width=70, elem_id="delete_conversation")
                with gr.Group(visible=False) as self.asked:
                    gr.HTML(draw.said("Delete this conversation for good?"))
                    self.yes = gr.Button("Yes, delete it", variant="stop", elem_id="delete_conversation_yes")
                    self.no = gr.Button("Keep it")
                self.search = gr.Textbox(label="Search", placeholder="Search", show_label=False, max_lines=1,
                                         container=False, elem_id="search_conversations")  # fmt: skip
                self.chosen = gr.Radio([], label="Conversations", show_label=False, container=False, interactive=True,
                                       elem_id="conversation")  # fmt: skip
            with gr.Column(scale=4, min_width=300):
                self.bar = ModelBar(client, notice)
                self.chat = gr.HTML(js_on_load=EDIT, elem_id="chat")
                with gr.Column(elem_id="composer"):
                    self.costs = gr.HTML(elem_id="timings")
                    with gr.Row(equal_height=True):
                        self.text = gr.Textbox(
                            label="Message", placeholder="Ask something. Enter sends, Shift+Enter begins a line.",
                            show_label=False, container=False, max_lines=8, scale=6, min_width=160, elem_id="message",
                        )  # fmt: skip
                        self.send = gr.Button("Send", variant="primary", scale=1, min_width=90, elem_id="send")
                        self.halt = gr.Button("■ Stop", visible=False, scale=1, min_width=90, elem_id="stop_answer")
                with gr.Accordion("System prompt, sampling, files", open=False):
                    self.system = gr.Textbox(label="System prompt", info="who the model is told to be", lines=2)
                    with gr.Row():
                        self.sampling = {
                            name: number_box(label_of(name), info_of(name, words), min_width=140)
                            for name, words in SAMPLING
                        }
                    with gr.Row(elem_classes="oc-actions"):
                        self.again = gr.Button("Answer again", elem_id="again")
                    self.links = gr.HTML()
        self.opened = [self.chosen, self.chat, self.costs, self.links, self.system, self.send, self.halt, self.text,
                       *self.sampling.values()]  # fmt: skip
        self._wire()

    def _wire(self) -> None:
        settings = [self.system, *self.sampling.values()]
        self.drawn = [self.chat, self.costs, self.text, self.chosen, self.send, self.halt, self.links]
        as_before = *[gr.skip()] * 4, *buttons(False), gr.skip()
        answers = [
            self.notice.on(triggers, work, [self.chosen, *inputs, *settings], self.drawn, refused=as_before)
            for triggers, work, inputs in (
                ([self.send.click, self.text.submit], self._send, [self.text]),
                ([self.again.click], self._again, []),
                ([self.chat.edit], self._edit, []),
            )
        ]
        self.halt.click(self._stop, self.chosen, None, **QUIET)
        found = self.search.change(self._found, self.search, self.chosen, trigger_mode="always_last", **QUIET)
        left = [self.chosen, self.chat, self.costs, self.links]  # at once: the next message is not of the old one
        self.new.click(None, None, left, js=f"() => [null, {json.dumps(EMPTY)}, '', '']", **QUIET)
        new = self.notice.on([self.new.click], self._new, settings, self.opened, cancels=answers)
        gr.on([self.send.click, self.text.submit], None, None, None, cancels=[new], **QUIET)
        shown = self.chosen.input(self.show, self.chosen, self.opened, cancels=[*answers, found], **QUIET)
        shown.then(self.follow, self.chosen, self.drawn, **QUIET)
        gr.on([self.delete.click], lambda: gr.update(visible=True), None, self.asked, **QUIET)
        gr.on([self.no.click, self.yes.click, self.chosen.change], lambda: gr.update(visible=False), None, self.asked,
              **QUIET)  # fmt: skip
        self.notice.on([self.yes.click], self._delete, [self.chosen], self.opened, cancels=[*answers, new])

    def open(self) -> tuple[Any, ...]:
        """The latest conversation."""
        try:
            names = self._names()
        except ClientError as error:
            return gr.skip(), EMPTY, draw.said(str(error), "bad"), *[gr.skip()] * 4, *UNSET
        name = names[0][1] if names else None
        return gr.update(choices=names, value=name), *self.show(name)[1:]

    def show(self, name: str | None) -> tuple[Any, ...]:
        """A conversation as it is kept."""
        if not name:
            return gr.skip(), EMPTY, "", "", gr.skip(), *buttons(False), *UNSET
        try:
            one = self.client.get("conversations", name)
        except ClientError as error:
            return gr.skip(), EMPTY, draw.said(str(error), "bad"), "", gr.skip(), *buttons(False), *UNSET
        last = one["messages"][-1] if one["messages"] else {}
        whole = messages_of(one["messages"]), costs_of(last), self._links(name), one["system"]
        numbers = (str(one["sampling"].get(field, "")) for field in self.sampling)
        return gr.skip(), *whole, *buttons(one["is_under_way"]), one.get("draft") or gr.skip(), *numbers

    def follow(self, name: str | None) -> Iterator[tuple[Any, ...]]:
        """Draw the answer that is being written in a conversation, if any: a page that was loaded anew goes on."""
        yield (gr.skip(),) * len(self.drawn)  # of nothing at all Gradio would make empty parts
        with contextlib.suppress(ClientError):  # none is being written
            if name:
                yield from self._drawn(name, self.client.watch("conversations", name, "answer"))

    # --- events

    def _send(self, name: str | None, text: str, *settings: Any) -> Iterator[tuple[Any, ...]]:
        yield from self._answer(name, {"text": text}, settings)

    def _again(self, name: str | None, *settings: Any) -> Iterator[tuple[Any, ...]]:
        yield from self._answer(name, {"regenerate": True}, settings)

    def _edit(self, edited: gr.EditData, name: str | None, *settings: Any) -> Iterator[tuple[Any, ...]]:
        yield from self._answer(name, {"text": edited.value, "at": edited.index}, settings)

    def _answer(self, name: str | None, what: dict[str, Any], settings: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        told = self._told(settings)
        chosen = name or self._unused(told)
        if name:
            self.client.patch("conversations", name, **told)
        named = gr.skip() if name else gr.update(choices=self._names(), value=chosen)
        yield *[gr.skip()] * 3, named, *buttons(True), self._links(chosen)  # at once: an answer may be long in coming
        cleared = "" if "text" in what else gr.skip()
        for chat, costs, draft, *rest in self._drawn(
            chosen, self.client.events("conversations", chosen, "answer", **what)
        ):
            yield chat, costs, draft if isinstance(draft, str) else cleared, *rest
            cleared = gr.skip()  # what is typed from here on is the next message

    def _drawn(self, name: str, events: Iterator[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
        """Draw the page at the events of an answer, more seldom the longer it is."""
        kept: list[dict[str, Any]] = []
        drawn_s = 0.0
        for event in events:
            is_last = event["event"] in ("done", "error")
            names = gr.skip() if kept and not is_last else gr.update(choices=self._names(), value=name)
            if not kept:  # the user's message is kept now; the answer that is being written may be, too
                kept = self.client.get("conversations", name)["messages"]
                kept = kept[:-1] if kept and kept[-1]["role"] == "assistant" else kept
            every_s = DRAW_EVERY_S * max(1.0, len(event.get("content", "")) / DRAWN_CHARS)
            if not is_last and time.monotonic() - drawn_s < every_s:
                continue
            drawn_s, draft = time.monotonic(), gr.skip()
            if event["event"] == "error":
                draft = event.get("draft", draft)
                kept = self.client.get("conversations", name)["messages"]
                chat, costs = messages_of(kept), draw.said(event["message"], "bad")
            else:
                message = event["message"] if is_last else event
                chat = messages_of([*kept, {"role": "assistant", "is_under_way": not is_last, **message}])
                costs = costs_of(message) if is_last else ""
            yield chat, costs, draft, names, *buttons(not is_last), gr.skip()

    def _stop(self, name: str | None) -> None:
        until_s = time.monotonic() + STOP_WITHIN_S  # what was just asked for may not have begun
        while name and not self.client.delete("conversations", name, "answer")["stopped"]:
            if time.monotonic() > until_s:
                return
            time.sleep(DRAW_EVERY_S)  # the answer's last event then draws the rest

    def _found(self, words: str) -> Any:
        return gr.update(choices=self._names(words))

    def _new(self, *settings: Any) -> tuple[Any, ...]:
        name = self._unused(self._told(settings))
        return gr.update(choices=self._names(), value=name), *self.show(name)[1:]

    def _unused(self, told: dict[str, Any]) -> str:
        """A conversation in which nothing was said: one that is there, or a new one."""
        for one in self.client.get("conversations")["data"]:
            if not one["turns"] and not one["title"]:
                return self.client.patch("conversations", one["id"], **told)["id"]
        return self.client.post("conversations", **told)["id"]

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

    def _names(self, search: str = "") -> list[tuple[str, str]]:
        found = self.client.get("conversations", search=search)["data"]
        return [(one["title"] or "New conversation", one["id"]) for one in found]


def buttons(is_under_way: bool) -> tuple[Any, Any]:
    """Send or Stop, never both."""
    return gr.update(visible=not is_under_way), gr.update(visible=is_under_way)


def messages_of(messages: list[dict[str, Any]]) -> str:
    """A conversation; what the model wrote is Markdown, what the user wrote stays as it is. Reasoning is folded."""
    return draw.page(*(_message(index, one) for index, one in enumerate(messages))) if messages else EMPTY


def _message(index: int, one: dict[str, Any]) -> str:
    content = one.get("content") or ""
    if one["role"] == "user":
        body = f'<div class="text">{draw.text(content)}</div><button type="button" class="oc-edit">Edit</button>'
    else:
        left_out = one.get("left_out")
        words = f"The first {left_out} messages were left out: with them the model's context is too short."
        note = draw.paragraph(words, "note") if left_out else ""
        reasoning = draw.markdown(one.get("reasoning") or "")
        waits = draw.paragraph(one.get("message") or "Writing ...", "dim") if one.get("is_under_way") else ""
        folded = f"<details><summary>Reasoning</summary>{reasoning}</details>" if reasoning else ""
        body = f'<div class="md">{note}{folded}{draw.markdown(content)}{waits}</div>'
    return f'<article class="{draw.text(one["role"])}" data-index="{index}">{body}{draw.copy_button(content)}</article>'


def costs_of(message: dict[str, Any]) -> str:
    """Write the cost of an answer, its tokens and seconds, in a line; the rest is folded."""
    times = message.get("timings")
    if not times:
        return ""
    words, more = [f"{times['tokens']} tokens"], []
    if times["tokens_per_s"]:
        words.append(f"{times['tokens_per_s']:.1f} tokens/s")
    if times["prefill_s"] is not None:
        words.append(f"first word after {draw.seconds(times['prefill_s'])}")
        more.append(f"then {draw.seconds(times['decode_s'])}")
    ends = {"cancelled": "stopped", "length": "ended at max_tokens", "error": "broken off"}
    if message.get("finish") in ends:
        words.insert(0, ends[message["finish"]])
    if times["hit_rate"] is not None:
        more.append(f"{times['hit_rate']:.0%} of {times['prompt_tokens']} prompt tokens known from before")
    more += residency_of(times)
    folded = f"<summary>{draw.text('; '.join(words))}</summary>{draw.paragraph('; '.join(more))}"
    return draw.page(f'<details class="dim">{folded}</details>')


def residency_of(times: dict[str, Any]) -> list[str]:
    """Words for where weights live and how full the room for keys and values is."""
    weights = {home: size for home, size in (times.get("weight_bytes") or {}).items() if size}
    homes = [f"{draw.amount(home, size)} in {draw.TIER_NAMES[home]}" for home, size in weights.items()]
    found = [f"weights {', '.join(homes)}"] if homes else []
    if times.get("kv_used_share") is not None:
        found.append(f"keys and values {times['kv_used_share']:.0%} of {draw.amount('ram', times['kv_bytes'])} used")
    return found
