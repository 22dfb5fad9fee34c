"""Adapters side by side: each request has its own, in one batch, and says what it says alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from outcore.infer.opening.check import CPU
from outcore.infer.passes import SmallPasses
from outcore.infer.requests import Request, Sampling
from outcore.model.adapters import by_rows
from tests.infer.models import greedy, opening, prompts_of, save_tiny_model
from tests.refused import refused

pytest.importorskip("peft")


def save_adapter(model, folder, *, seed, rank=4, alpha=12, targets=("q_proj", "v_proj", "down_proj"), **more):
    """A LoRA adapter that changes what the model says."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), **more)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(folder)
    adapted.unload()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(folder of a model, folders of two adapters of other ranks on other layers)."""
    root = tmp_path_factory.mktemp("adapters")
    model, _ = save_tiny_model(root / "base")
    save_adapter(model, root / "one", seed=1)
    save_adapter(model, root / "two", seed=2, rank=6, targets=("q_proj", "o_proj"), use_rslora=True)
    return root / "base", (str(root / "one"), str(root / "two"))


def together(engine, prompts, count=12):
    """Answers of the base and of every adapter to all prompts, in one batch: [adapter][prompt]."""
    sampling = Sampling(temperature=0, max_tokens=count, ignore_eos=True)
    requests = [
        Request(f"{adapter} {number}", tuple(prompt), sampling, adapter=adapter)
        for number, prompt in enumerate(prompts)
        for adapter in range(3)
    ]
    found = {answer.request: [c.token for c in answer.tokens] for answer in engine.generate(requests)}
    return [[found[f"{adapter} {number}"] for number in range(len(prompts))] for adapter in range(3)]


@pytest.mark.more(after=2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"deterministic": True},
        {"deterministic": True, "precision": "bf16"},
        {"compile": "on", "max_sequences": 4},
    ],
)
def test_each_adapter_says_in_company_what_it_says_alone(base, settings):
    folder, adapters = base
    prompts, alone = prompts_of(4), []
    numbers = {name: value for name, value in settings.items() if name in ("deterministic", "precision")}
    for adapter in (None, *adapters):
        with opening(folder, adapter=adapter, page_tokens=4, **numbers) as opened:
            alone.append(greedy(opened.engine, prompts, 12, ignore_eos=True))
    assert alone[0] != alone[1] != alone[2] != alone[0]
    with opening(folder, adapters=adapters, page_tokens=4, **settings) as opened:
        assert together(opened.engine, prompts) == alone
        assert together(opened.engine, prompts) == alone, "from the cache, each from its own"
        assert opened.engine.counts.cached_tokens
        refused(ValueError, "opened with 2", lambda: opened.engine.submit(Request("x", (1,), Sampling(), adapter=3)))


def test_each_adapter_gives_the_likelihoods_that_peft_gives(base, tmp_path):
    """With odd scales: 7 / 4, 13 / sqrt(6), 5 / 3."""
    from peft import PeftModel

    folder, prompts = base[0], [prompt for prompt in prompts_of(4) if len(prompt) > 1]
    asked = (
        {"alpha": 7},
        {"alpha": 13, "rank": 6, "use_rslora": True},
        {"alpha": 5, "rank": 3, "targets": ("o_proj",)},
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    places = [str(tmp_path / str(number)) for number in range(3)]
    for number, (place, fields) in enumerate(zip(places, asked, strict=True)):
        save_adapter(model, place, seed=number, **fields)
    sampling = Sampling(temperature=0, max_tokens=2, ignore_eos=True, logprobs=20)
    requests = [
        Request(f"{number} {adapter}", tuple(prompt), sampling, adapter=adapter)
        for number, prompt in enumerate(prompts)
        for adapter in (1, 2, 3)
    ]
    with opening(folder, adapters=places) as opened:
        found = {answer.request: answer.tokens for answer in opened.engine.generate(requests)}
    for adapter, place in enumerate(places, 1):
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), place).eval()
        for number, prompt in enumerate(prompts):
            tokens = found[f"{number} {adapter}"]
            with torch.no_grad():
                logits = theirs(input_ids=torch.tensor([[*prompt, tokens[0].token]])).logits[0, -2:]
            for expected, said in zip(logits.log_softmax(-1), tokens, strict=True):
                assert said.token == expected.argmax()
                assert [p for _, p in said.top] == pytest.approx([float(expected[t]) for t, _ in said.top], abs=1e-5)


def test_a_scale_is_not_rounded_to_the_16_bits_of_the_weights():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=6, lora_alpha=13, use_rslora=True, target_modules=["0"])
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False)), config, "own").bfloat16()
    with torch.no_grad():  # whole numbers whose products 16 bits hold: only the scale is left to round
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
        x = torch.randint(-1, 2, (5, 32)).bfloat16()
        expected = model(x)
        choice = by_rows(model, ["own"], None)
        choice.source = lambda: torch.ones(5, dtype=torch.long)
        assert torch.equal(model(x), expected)


def test_small_passes_at_fixed_addresses_know_whose_rows_they_are(base):
    folder, adapters = base
    prompts = prompts_of(3)
    with opening(folder, adapters=adapters) as opened:
        expected = together(opened.engine, prompts)
        opened.engine.scheduler.cache.clear_prefixes()
        runner = opened.engine.runner
        runner.small = SmallPasses(runner.flow, runner.attention, runner.attention.cache, CPU, is_captured=False)
        assert together(opened.engine, prompts) == expected


def test_what_an_adapter_has_read_is_found_after_a_restart_and_by_no_other(base, tmp_path):
    folder, adapters = base
    prompt, sampling = tuple(range(5, 45)), Sampling(temperature=0, max_tokens=4, ignore_eos=True)
    settings = {"page_tokens": 4, "prefix_path": tmp_path, "prefix_gib": 0.01}
    with opening(folder, adapters=adapters, **settings) as opened:
        (said,) = opened.engine.generate([Request("a", prompt, sampling, adapter=2)])
    with opening(folder, adapters=adapters[::-1], **settings) as opened:
        cached = {}
        for adapter in (0, 2, 1):  # the other one has the number now
            (again,) = opened.engine.generate([Request(f"{adapter}", prompt, sampling, adapter=adapter)])
            cached[adapter] = again.timings.read_tokens
        assert cached == {0: 0, 2: 0, 1: 36}
        assert [c.token for c in again.tokens] == [c.token for c in said.tokens]


def test_adapters_that_cannot_stand_side_by_side_are_refused(base, tmp_path):
    folder, adapters = base
    model, _ = save_tiny_model(tmp_path / "wide", hidden_size=128)
    save_adapter(model, tmp_path / "other", seed=1)
    model, _ = save_tiny_model(tmp_path / "same")
    save_adapter(model, tmp_path / "dora", seed=1, use_dora=True)
    save_adapter(model, tmp_path / "head", seed=1, targets=("lm_head",))
    for name, words in (("other", "does not fit the model"), ("dora", "DoRA"), ("head", "lm_head")):
        asked = (adapters[0], str(tmp_path / name))
        refused(ValueError, words, lambda asked=asked: opening(folder, adapters=asked))
    save_tiny_model(tmp_path / "mamba", family="mamba", state_size=8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mamba")
    save_adapter(model, tmp_path / "states", seed=1, targets=("in_proj",))
    with opening(tmp_path / "mamba", adapters=(str(tmp_path / "states"),)) as opened:
        assert opened.way == "steps"
