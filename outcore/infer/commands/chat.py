"""`outcore chat MODEL`: a conversation in the terminal. Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outcore.common.output import say, show, tell_error
from outcore.common.quantities import counted
from outcore.config.commands import chat_flags
from outcore.infer.commands.options import sampling_fields, sampling_from, settings_of, tell_plan
from outcore.infer.commands.seeing import chat_about
from outcore.infer.opening import OpenedModel, against_plan, open_engine
from outcore.infer.requests import Answer, Prompts, Request, Sampling, sampling_of

HELP = """/reset            forget the conversation
/system TEXT      tell the model who it is (and forget the conversation)
/save FILE        write the conversation as JSON
/stats            what the last answer cost
/quit, /exit      end (or Ctrl-D)"""


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    args = chat_flags().parse_args(argv)
    try:
        fields = {"max_tokens": 1024} | sampling_fields(args)
        sampling_of(fields, Sampling())  # what cannot be is refused before a model is read
        if args.image:
            return chat_about(args, sys.stdin)
        opened = open_engine(args.model, settings_of(args), say)
        try:
            talk = Conversation(opened, fields, args.system)
            talk.run()
            tell_plan(talk.told, "chat")
        finally:
            opened.close()
    except (ValueError, RuntimeError, OSError) as error:
        return tell_error("chat", error)
    return 0


class Conversation:
    """One conversation; `run` reads and answers until the end."""

    def __init__(self, opened: OpenedModel, fields: dict[str, Any], system: str | None) -> None:
        self.opened, self.system, self.told = opened, system, against_plan(opened)
        self.prompts = Prompts(opened.found.tokenizer)
        context = opened.engine.max_tokens
        self.sampling = sampling_from(opened, fields)(0).fitting(context // 2, context)
        self.messages: list[dict[str, str]] = []
        self.last: Answer | None = None
        self._turn, self._is_cut = 0, False
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: print(HELP),
            "/reset": lambda rest: self._reset(self.system),
            "/system": self._reset,
            "/save": self._save,
            "/stats": lambda rest: print(self.stats()),
        }

    def run(self) -> None:
        """Read lines and answer them, until /quit or the end of the input."""
        if self.prompts.note:
            say(self.prompts.note)
        say("Ask something; /help lists commands, Ctrl-C stops an answer.")
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                say("\n(/quit or Ctrl-D ends)")
                continue
            if line.startswith("/"):
                name, _, rest = line.partition(" ")
                if name in ("/quit", "/exit"):
                    return
                command = self._commands.get(name)
                if command is None:
                    say(f"unknown command {name}; /help lists them")
                else:
                    command(rest.strip())
            elif line:
                self.answer(line)

    def answer(self, line: str) -> str:
        """Say the answer as it comes; what Ctrl-C left of it stays in the conversation."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            ids = self._fitting([*system, *asked])
        except ValueError as error:
            say(str(error))
            return ""
        self._turn += 1
        engine = self.opened.engine
        request = Request(f"turn-{self._turn}", ids, self.sampling.fitting(len(ids), engine.max_tokens))
        ended: list[Answer] = []
        try:
            engine.submit(request, lambda piece: show(piece.text), ended.append)
        except ValueError as error:
            say(f"{error} (this message is left out)")
            return ""
        before = signal.signal(signal.SIGINT, lambda *_: engine.cancel(request.name))
        try:
            while not ended:
                engine.step()
        finally:
            signal.signal(signal.SIGINT, before)
        self.last = ended[0]
        print(" (stopped)" if self.last.finish == "cancelled" else "", flush=True)
        if self.last.finish == "error":
            raise RuntimeError(self.last.error)
        self.messages = [*asked, {"role": "assistant", "content": self.last.text}]
        return self.last.text

    def stats(self) -> str:
        """Text for people: seconds and tokens of the last answer, then all passes beside the plan."""
        if self.last is None:
            return "nothing was answered yet"
        times, written = self.last.timings, len(self.last.tokens)
        rate = max(0, written - 1) / max(1e-9, times.total_s - times.first_token_s)
        guesses = f", {times.accepted} of {times.drafted} guesses right" if times.drafted else ""
        return (
            f"first word after {times.first_token_s:.2f} s ({counted(times.cached_tokens, 'token')} known "
            f"from before), {counted(written, 'token')} at {rate:.1f} tokens/s{guesses}\n{self.told.words()}"
        ).rstrip()

    def _fitting(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """Tokens of the conversation; its oldest turns are left out when it outgrows the context: said once. ValueError
        for a message that alone does."""
        limit, count = self.opened.engine.max_tokens, len(messages)
        room, first = limit - self.sampling.max_tokens, 1 if messages[0]["role"] == "system" else 0
        while len(ids := self.prompts.of_messages(messages)) > room and len(messages) > first + 1:
            del messages[first : first + 2]
        if len(ids) >= limit:
            raise ValueError(f"(left out: this message alone takes {len(ids):,} of the context's {limit:,} tokens)")
        if len(messages) < count and not self._is_cut:
            say(f"(from here on the oldest turns are left out: the context is {limit:,} tokens)")
            self._is_cut = True
        return ids

    def _reset(self, system: str | None) -> None:
        self.system, self.messages, self._is_cut = system or None, [], False
        say("(a new conversation)")

    def _save(self, name: str) -> None:
        if not name:
            say("/save needs a file name")
            return
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            text = json.dumps({"messages": system + self.messages}, ensure_ascii=False, indent=1)
            Path(name).expanduser().write_text(text, encoding="utf-8")
            say(f"(saved to {name})")
        except OSError as error:
            say(f"cannot save {name}: {error.strerror or error}")
