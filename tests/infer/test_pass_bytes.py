"""Bytes that the allocator gives during a pass, beside those that the placement counts on."""

from __future__ import annotations

import pytest
import torch

from outcore.flow import discover_units
from outcore.infer.cache import KvMemory, KvShape, KvStore
from outcore.infer.opening.check import CPU, kept_of_layers
from outcore.infer.opening.limits import layer_size
from outcore.infer.requests import Request, Sampling
from outcore.infer.schedule import ScheduleLimits
from outcore.model import shape_from_config
from outcore.sizing.inference import GRAPH_ROWS, AttentionLimits, PassSize
from outcore.sizing.inference.pass_bytes import LIBRARY_BYTES, pass_bytes
from tests.flow.models import tiny_loaded
from tests.flow.peak import peak_bytes
from tests.infer.models import TinyEngine

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = 16
WIDTHS = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192,
}  # fmt: skip
SHORT, LONG = AttentionLimits(1 << 18, 1 << 16), AttentionLimits(1 << 20, 1 << 20)


CASES = {
    # family, tokens of the prompt, of the pass, of a chunk, limits, more fields
    "pieces": ("llama", 4000, 512, 256, SHORT, {}),
    "few tokens over many pages": ("llama", 16 * 256 + 31, 32, 32, LONG, {}),
    "short prompt": ("llama", 500, 512, 256, LONG, {}),
    "wide feed-forward": ("llama", 256, 256, 256, LONG, {"intermediate_size": 2816}),
    "many chunks wait": ("llama", 4000, 2048, 64, SHORT, {}),
    "large vocabulary": ("llama", 128, 128, 128, SHORT, {"vocab_size": 60000}),
    "scores in memory": ("gemma2", 2000, 256, 256, AttentionLimits(1 << 19, 1 << 16), {"sliding_window": 512}),
    "experts": ("qwen3_moe", 1000, 256, 256, SHORT, {"moe_intermediate_size": 704}),
    "sinks": ("gpt_oss", 2000, 256, 256, AttentionLimits(1 << 19, 1 << 16), {"sliding_window": 128}),
}


@pytest.mark.more(after=2)
@pytest.mark.parametrize("name", CASES)
def test_counted_bytes_hold_what_a_pass_takes(name):
    family, prompt, tokens, chunk, limits, fields = CASES[name]
    loaded = tiny_loaded(family, **{**WIDTHS, **fields})
    attentions = kept_of_layers(loaded, discover_units(loaded)).attentions.values()
    tiny = {"num_pages": prompt // PAGE + 8, "call_tokens": chunk, "limits": limits}
    one = TinyEngine(
        family, loaded=loaded, speculates=False, page_tokens=PAGE, limits=ScheduleLimits(4, tokens, chunk, 0), tiny=tiny
    )
    one.engine.speech = one.engine.speech.__class__(one.engine.speech.tokenizer, frozenset(), 10**6, None)
    ids = torch.randint(2, 100, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()

    def answer(length: int) -> None:
        sampling = Sampling(temperature=1, seed=1, max_tokens=2, ignore_eos=True, logprobs=2)
        if name == "large vocabulary":
            one.engine.score([ids[:length]])
            return
        list(one.engine.generate([Request(f"{length}", tuple(ids[:length]), sampling)]))
        one.cache.clear_prefixes()

    answer(min(prompt, 2 * chunk))  # what is made once
    measured = peak_bytes(lambda: answer(prompt))
    layer = layer_size(loaded, shape_from_config("tiny", loaded.config), attentions, CPU, torch.float32)
    size = PassSize(tokens, chunk, prompt + 2, 1, 0)
    counted = pass_bytes(layer, loaded.facts.vocab_size, size, 4, limits=limits)
    one.close()
    assert measured <= counted <= 1.2 * measured


def test_counted_bytes_hold_what_passes_of_fixed_sizes_keep():
    """Many sizes, of which none may hold anything for itself alone but its tables."""
    loaded = tiny_loaded("llama", **WIDTHS, vocab_size=4000)
    attentions = kept_of_layers(loaded, discover_units(loaded)).attentions.values()
    layer = layer_size(loaded, shape_from_config("tiny", loaded.config), attentions, CPU, torch.float32)
    tiny = {"num_pages": 300, "call_tokens": 64}
    one = TinyEngine("llama", loaded=loaded, page_tokens=PAGE, small=True, speculates=False, tiny=tiny)

    def answer() -> None:
        for length in (1, 3, 9, 40, 300, 500):
            prompts = [tuple(range(2, 2 + length))] * (4 if length < 10 else 1)
            sampling = Sampling(temperature=0, max_tokens=3, ignore_eos=True)
            list(one.engine.generate([Request(f"{length}-{n}", ids, sampling) for n, ids in enumerate(prompts)]))
        one.cache.clear_prefixes()

    measured = peak_bytes(answer)
    assert len(one.runner.small._slots) > 5
    size = PassSize(64, 16, 512, GRAPH_ROWS[-1], 0)
    plain, whole = (pass_bytes(layer, 4000, size, 4, has_graphs=graphs) for graphs in (False, True))
    assert measured <= whole - LIBRARY_BYTES and whole > plain + LIBRARY_BYTES
    one.close()


def test_graphs_have_room_for_pages_of_8_bits_read_back():
    loaded = tiny_loaded("llama", **WIDTHS, vocab_size=4000)
    attentions = kept_of_layers(loaded, discover_units(loaded)).attentions.values()
    layer = layer_size(loaded, shape_from_config("tiny", loaded.config), attentions, CPU, torch.float32)
    numbers = 1 << 24
    store = KvStore(KvShape(2, 32, 32), numbers // (PAGE * 128), PAGE, torch.bfloat16, KvMemory(CPU), "int8")
    pages = torch.arange(numbers // (PAGE * 128))[None]
    measured = peak_bytes(lambda: store.read(pages, CPU))
    size, limits = PassSize(64, 16, 2048, GRAPH_ROWS[-1], 0), AttentionLimits(gathered=numbers)
    more = {"is_packed_kv": True, "limits": limits}
    plain, whole = (pass_bytes(layer, 4000, size, 2, has_graphs=graphs, **more) for graphs in (False, True))
    assert measured <= whole - plain - LIBRARY_BYTES <= 1.25 * measured


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen2"])
def test_the_plan_knows_the_windows_that_layers_have(family):
    loaded = tiny_loaded(family)
    seen = [size.window for size in kept_of_layers(loaded, discover_units(loaded)).attentions.values()]
    planned = shape_from_config("tiny", loaded.config).windows or ((None, len(seen)),)
    assert {window: seen.count(window) for window in seen} == dict(planned)
