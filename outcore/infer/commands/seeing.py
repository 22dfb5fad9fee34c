"""`--image`: an image-text model answers about pictures, one answer at a time."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outcore.common.output import say, show
from outcore.common.quantities import counted
from outcore.config.commands import chat_flags
from outcore.data.pictures import conversation_of
from outcore.infer.commands.options import sampling_fields, sampling_from, settings_of
from outcore.infer.opening import InferSettings, open_engine
from outcore.infer.requests import Request

MAX_TOKENS = 512
"""Length of an answer when nobody says."""


class Sight:
    """A model that sees, opened once."""

    def __init__(self, args: argparse.Namespace, settings: InferSettings) -> None:
        self._opened = open_engine(args.model, replace(settings, pictures=True), say)
        self._sampling = sampling_from(self._opened, {"max_tokens": MAX_TOKENS} | sampling_fields(args))
        self.close, self._turn = self._opened.close, 0

    def answer(self, messages: Sequence[dict[str, Any]], pictures: Sequence[str]) -> str:
        """The answer, shown as it is written. PictureError (a ValueError) for a picture that cannot be used."""
        talk, encoder = conversation_of(messages, list(pictures) or None, Path()), self._opened.found.pictures
        assert encoder is not None
        for line in talk.said:
            say(line)
        seen = encoder.inputs_of(encoder.written(talk), talk)
        ids = tuple(seen.pop("input_ids")[0].tolist())
        del seen["attention_mask"]
        self._turn += 1
        request = Request(f"turn-{self._turn}", ids, self._sampling(len(ids)), seen=seen)
        (answer,) = self._opened.engine.generate([request], lambda piece: show(piece.text))
        print(flush=True)
        if answer.finish == "error":
            raise RuntimeError(answer.error)
        cost = f"{counted(len(talk.pictures), 'picture')}, {counted(len(answer.tokens), 'token')}"
        say(f"{cost} in {answer.timings.total_s:.1f} s")
        return answer.text


def answer_about(args: argparse.Namespace, prompt: str) -> int:
    """Answer one question about pictures; the exit code."""
    sight = Sight(args, settings_of(args, deterministic=args.deterministic))
    try:
        sight.answer([{"role": "user", "content": prompt}], args.image)
    finally:
        sight.close()
    return 0


def chat_about(args: argparse.Namespace, lines: Iterable[str]) -> int:
    """A conversation about pictures; `/image PATH` shows one more, with the next message."""
    settings = settings_of(args)
    if args.preset == chat_flags().get_default("preset"):  # nobody said an aim, and there is one way
        settings = replace(settings, preset=InferSettings.preset)
    sight, messages, pictures = Sight(args, settings), list[dict[str, Any]](), list[str]()
    if args.system:
        messages.append({"role": "system", "content": args.system})
    waiting = list(args.image)
    say("Ask about the pictures; /image PATH shows one more, /quit ends.")
    for line in lines:
        line = line.strip()
        if not line:
            continue
        if line.startswith("/image "):
            waiting.append(line.removeprefix("/image ").strip().strip("'\""))  # as a terminal writes a dragged file
            continue
        if line in ("/quit", "/exit"):
            break
        asked = {"role": "user", "content": "<image>" * len(waiting) + line}
        try:
            told = sight.answer([*messages, asked], [*pictures, *waiting])
        except ValueError as error:
            say(f"{error} (this message is left out)")
            waiting = []
            continue
        messages += [asked, {"role": "assistant", "content": told}]
        pictures, waiting = [*pictures, *waiting], []
    sight.close()
    return 0
