"""`--image`: an image-text model answers about pictures, one answer at a time, by transformers' own `generate` over
streamed layers. Flags that this way does not read are refused, not ignored."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from outcore import hf
from outcore.common.output import say, show
from outcore.common.quantities import counted
from outcore.config.commands import SAMPLING_FLAGS, chat_flags, generate_flags
from outcore.data.pictures import conversation_of
from outcore.infer.opening import find_place

MAX_TOKENS = 512
"""Length of an answer when nobody says."""
READ = frozenset(
    {
        "model",
        "prompt",
        "image",
        "chat",
        "system",
        "adapter",
        "vram_gib",
        "ram_gib",
        "nvme_path",
        "quantize",
        "trust_remote_code",
    }
    | {
        "nvme_path",
        "quantize",
        "trust_remote_code",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "max_tokens",
        "seed",
    }
)


class Sight:
    """A model that sees, opened once."""

    def __init__(self, args: argparse.Namespace, flags: argparse.ArgumentParser) -> None:
        from peft import PeftModel

        plain = vars(flags.parse_args([args.model]))
        others = [name for name, value in vars(args).items() if name in plain.keys() - READ and value != plain[name]]
        others = ["aim" if name == "preset" else name for name in others]
        if others:
            raise ValueError(f"answers about pictures do not read --{', --'.join(sorted(others))}; leave it out.")
        place = find_place(args.model, args.adapter)
        if place.checkpoint is not None:
            raise ValueError(f"{place.checkpoint} is a checkpoint of a text model, which takes no pictures.")
        self.model = hf.load_image_text(place.weights, trust_remote_code=args.trust_remote_code)
        self.encoder = hf.encoder_of(place.weights, self.model, trust_remote_code=args.trust_remote_code)
        if place.adapter is not None:
            self.model = PeftModel.from_pretrained(self.model, place.adapter).merge_and_unload()
        nvme = args.nvme_path or None
        quantize = None if args.quantize in (None, "none") else args.quantize
        ram_gib = args.ram_gib if nvme else None
        hf.stream(self.model.eval(), vram_gib=args.vram_gib, ram_gib=ram_gib, nvme=nvme, quantize=quantize)
        self.seed, self.sampling = args.seed, _sampling(args)

    def answer(self, messages: Sequence[dict[str, Any]], pictures: Sequence[str], folder: Path) -> str:
        """The answer, shown as it is written. PictureError (a ValueError) for a picture that cannot be used."""
        import torch
        from transformers import TextStreamer

        talk = conversation_of(messages, list(pictures) or None, folder)
        for line in talk.said:
            say(line)
        if self.seed is not None:
            torch.manual_seed(self.seed)
        tokenizer = self.encoder.tokenizer

        class Shown(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                show(text)

        streamer = Shown(tokenizer, skip_prompt=True, skip_special_tokens=True)
        began_s = time.perf_counter()
        tokens = hf.answer(self.model, self.encoder, talk, streamer, **self.sampling)
        print(flush=True)
        seconds = max(1e-9, time.perf_counter() - began_s)
        say(f"{counted(len(talk.pictures), 'picture')}, {counted(len(tokens), 'token')} in {seconds:.1f} s")
        return tokenizer.decode(tokens, skip_special_tokens=True)


def answer_about(args: argparse.Namespace, prompt: str) -> int:
    """Answer one question about pictures; the exit code."""
    Sight(args, generate_flags()).answer([{"role": "user", "content": prompt}], args.image, Path())
    return 0


def chat_about(args: argparse.Namespace, lines: Iterable[str]) -> int:
    """A conversation about pictures; `/image PATH` shows one more, with the next message."""
    sight, messages, pictures = Sight(args, chat_flags()), list[dict[str, Any]](), list[str]()
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
            told = sight.answer([*messages, asked], [*pictures, *waiting], Path())
        except ValueError as error:
            say(f"{error} (this message is left out)")
            waiting = []
            continue
        messages += [asked, {"role": "assistant", "content": told}]
        pictures, waiting = [*pictures, *waiting], []
    return 0


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """What was said, as transformers' `generate` takes it; the model's own defaults for the rest."""
    said = {name: getattr(args, name) for name, _, _ in SAMPLING_FLAGS if getattr(args, name, None) is not None}
    found = {name: said[name] for name in ("top_k", "top_p", "min_p", "repetition_penalty") if name in said}
    found["max_new_tokens"] = said.get("max_tokens", MAX_TOKENS)
    if said.get("temperature") == 0:
        return {**found, "do_sample": False, "top_k": None, "top_p": None, "temperature": None}
    return found | ({"do_sample": True, "temperature": said["temperature"]} if "temperature" in said else {})
