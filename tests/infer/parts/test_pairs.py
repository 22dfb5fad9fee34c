"""Settings in company: each pair of choices occurs in some case, and greedy answers equal transformers' generate."""

from __future__ import annotations

import copy
from contextlib import closing
from functools import partial
from itertools import chain, combinations, product

import pytest
import torch

from outcore.flow import CompiledLayers
from outcore.formats import PackedSpec, packed_format
from outcore.infer.opening import InferSettings, build, open_engine
from tests.infer.models import greedy, greedy_by_transformers, on_the_drive, prompts_of, save_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = {
    "full": {},
    "windows": {"family": "mistral", "sliding_window": 8, "head_dim": 16},
    "both": {
        "family": "gemma3_text",
        "sliding_window": 8,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "states": {"family": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
}
CHOICES = {
    "layers": tuple(LAYERS), "preset": ("balanced", "latency", "throughput"), "kv_home": ("auto", "nvme"),
    "weights": ("ram", "nvme"), "quantize": (None, "nf4", "int8"), "guesses": ("none", "text", "model"),
    "batch": ("alone", "ragged", "in small passes"), "prefixes": ("off", "shared", "kept"), "compile": ("off", "on"),
    "deterministic": (False, True),
}  # fmt: skip
Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs_of(case: dict[str, object]) -> set[Pair]:
    return set(combinations(case.items(), 2))


def is_refused(pair: Pair) -> bool:
    """What layers with states cannot: keep beginnings on a drive, run compiled."""
    choices = dict(pair)
    return choices.get("layers") == "states" and (choices.get("prefixes") == "kept" or choices.get("compile") == "on")


def covering() -> list[dict[str, object]]:
    """Cases in which all pairs occur: each begins with a pair that is left and takes the choices that cover most. What
    is compiled takes longest: those pairs come last, in cases of their own."""
    left = {
        pair
        for (a, some), (b, others) in combinations(CHOICES.items(), 2)
        for pair in (((a, x), (b, y)) for x, y in product(some, others))
        if not is_refused(pair)
    }
    cases = []
    while left:
        case: dict[str, object] = dict(min(left, key=lambda pair: (("compile", "on") in pair, repr(pair))))
        for name, choices in CHOICES.items():
            if name not in case:
                longer = [{**case, name: choice} for choice in (choices[:1] if name == "compile" else choices)]
                found = [{k: one[k] for k in CHOICES if k in one} for one in longer]
                found = [one for one in found if not any(map(is_refused, pairs_of(one)))]
                case = max(found, key=lambda one: len(pairs_of(one) & left))
        cases.append(case)
        left -= pairs_of(case)
    return cases


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """A function that tells a model's folder, and its answers with weights rounded as the format does."""
    made = {}

    def found(layers: str, quantize: str | None):
        if layers not in made:
            folder = tmp_path_factory.mktemp(layers)
            made[layers] = folder, *save_tiny_model(folder, intermediate_size=256, **LAYERS[layers])[:1], {}
        folder, model, answers = made[layers]
        if quantize not in answers:
            rounded = copy.deepcopy(model)
            for module in rounded.model.layers.modules() if quantize else ():
                if isinstance(module, torch.nn.Linear) and module.in_features % packed_format(quantize).block == 0:
                    spec = PackedSpec(packed_format(quantize), tuple(module.weight.shape))
                    module.weight.data = spec.unpack(spec.pack(module.weight.data))
            answers[quantize] = [greedy_by_transformers(rounded, prompt, 8) for prompt in prompts_of(4, vocab=280)]
        return folder, answers[quantize]

    return found


@pytest.mark.more(after=2)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case["compile"] == "on" else ()) for case in covering()],
    ids=lambda case: "-".join(str(choice) for choice in case.values()),
)
def test_every_pair_of_settings(model_of, tmp_path, monkeypatch, case):
    folder, expected = model_of(case["layers"], case["quantize"])
    drive = (tmp_path,) if "nvme" in (case["kv_home"], case["weights"]) else ()
    settings = InferSettings(
        preset=case["preset"], context=128, ram_gib=1, page_tokens=4, nvme_path=drive, kv_home=case["kv_home"],
        quantize=case["quantize"], cpu_tokens=0 if case["quantize"] else None, compile=case["compile"],
        deterministic=case["deterministic"], share_prefixes=case["prefixes"] != "off",
        **({"prefix_path": tmp_path / "kept", "prefix_gib": 0.01} if case["prefixes"] == "kept" else {}),
        draft_tokens=0 if case["guesses"] == "none" else None,
        draft_model=str(model_of("full", None)[0]) if case["guesses"] == "model" else None,
        **({"pass_tokens": 16, "chunk_tokens": 16, "max_sequences": 2} if case["batch"] == "in small passes" else {}),
    )  # fmt: skip
    monkeypatch.setattr(build, "CompiledLayers", partial(CompiledLayers, backend=lambda module, inputs: module))
    if case["weights"] == "nvme":
        on_the_drive(monkeypatch)
    prompts = prompts_of(4, vocab=280)
    together = [[prompt] for prompt in prompts] if case["batch"] == "alone" else [prompts]
    for _ in range(1 + (case["prefixes"] == "kept")):
        with closing(open_engine(str(folder), settings)) as opened:
            assert case["compile"] == "off" or not opened.engine.runner.flow.runner.compiled.why_not
            for _ in range(2):
                found = [greedy(opened.engine, some, 8, ignore_eos=True) for some in together]
                assert list(chain(*found)) == expected
            counts = opened.engine.counts
            assert (counts.drafted > 0) == (case["guesses"] != "none")
            if case["batch"] != "in small passes":  # where two sequences' windows are all the room there is
                assert (counts.cached_tokens > 0) == (case["prefixes"] != "off")


def test_every_pair_is_in_some_case():
    seen = set().union(*map(pairs_of, covering()))
    possible = sum(len(a) * len(b) for a, b in combinations(CHOICES.values(), 2))
    assert len(seen) == possible - 2 and len(covering()) < 24, "kept or compiled states are refused"
