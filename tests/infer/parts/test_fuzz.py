"""Random companies of requests through the engine's door: every log-probability as a plain forward has it, whatever the
windows, sinks, chunks, pages, their format and their home."""

from __future__ import annotations

import random
from contextlib import closing

import pytest
import torch
from transformers import AttentionInterface

from outcore.infer.opening import InferSettings, open_engine
from outcore.infer.requests import Request, Sampling
from tests.infer.models import save_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS = {
    "full": {"family": "llama"},
    "windows and soft caps": {"family": "gemma2", "attn_logit_softcapping": 5.0, "head_dim": 16, **WINDOWS},
    "windows and sinks": {"family": "gpt_oss", "head_dim": 16, "num_local_experts": 4, **WINDOWS},
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """A function that gives a kind's folder and model."""
    made = {}

    def found(kind: str):
        if kind not in made:
            folder = tmp_path_factory.mktemp("fuzz")
            made[kind] = folder, save_tiny_model(folder, **MODELS[kind])[0]
        return made[kind]

    return found


def in_8_bits(rows: torch.Tensor) -> torch.Tensor:
    """[B, H, N, D] with one scale for each token and head."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
    return (rows / scale).round() * scale


def plain_attention(module, query, key, value, mask, scaling, dropout=0.0, softcap=None, sliding_window=None, **more):
    """Scores, mask, softmax, sums; [B, N, H, D] and no weights."""
    if getattr(module, "keeps_8_bits", False):
        key, value = in_8_bits(key), in_8_bits(value)
    shares, sinks = query.shape[1] // key.shape[1], more.get("s_aux")
    key, value = key.repeat_interleave(shares, 1), value.repeat_interleave(shares, 1)
    scores = query.double() @ key.double().mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(query.shape[2])
    seen = at[None] <= at[:, None]
    if sliding_window is not None:
        seen &= at[None] > at[:, None] - sliding_window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value.double()).to(query.dtype).transpose(1, 2), None


AttentionInterface.register("plain_reference", plain_attention)


@torch.no_grad()
def logprobs_of(model, tokens: list[int], kv_format: str) -> torch.Tensor:
    """[N, V]"""
    before = model.config._attn_implementation
    for module in model.modules():
        module.keeps_8_bits = kv_format == "int8"
    model.config._attn_implementation = "plain_reference"
    try:
        return model.eval()(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    finally:
        model.config._attn_implementation = before


def requests_of(draw: random.Random) -> list[Request]:
    """Some share a beginning, some are one token long."""
    beginning = [draw.randrange(2, 280) for _ in range(draw.randint(1, 40))]
    found = []
    for number in range(draw.randint(2, 6)):
        own = [draw.randrange(2, 280) for _ in range(draw.choice([1, 2, draw.randint(1, 60)]))]
        prompt = (beginning if draw.random() < 0.4 else []) + own
        heat = draw.choice([0.0, 0.0, 1.0])
        sampling = Sampling(heat, max_tokens=draw.randint(1, 24), ignore_eos=True, logprobs=3, seed=number)
        found.append(Request(str(number), tuple(prompt), sampling))
    return found


def answers_of(folder, settings: InferSettings, requests: list[Request]) -> dict[str, list]:
    """Chosen tokens of each request, with their log-probabilities; half of the requests come while others are read."""
    done: dict[str, list] = {}
    with closing(open_engine(str(folder), settings)) as opened:
        engine = opened.engine
        for at, request in enumerate(requests):
            if at == len(requests) // 2:
                engine.step()
                engine.step()
            engine.submit(request, None, lambda answer: done.update({answer.request: list(answer.tokens)}))
        while engine.step():
            pass
    return done


@pytest.mark.more(after=3)
@pytest.mark.parametrize("seed", range(18))
def test_any_company_has_the_numbers_of_a_plain_forward(model_of, tmp_path, seed):
    draw = random.Random(seed)
    kind, kv_format = list(MODELS)[seed % 3], draw.choice(["same", "int8"])
    folder, model = model_of(kind)
    chunk = draw.choice([16, 17, 23, 64])
    common = {
        "context": 160, "device": "cpu", "ram_gib": 1, "kv_format": kv_format,
        "page_tokens": draw.choice([1, 4, 16, 64]), "max_sequences": draw.randint(1, 6),
        "chunk_tokens": chunk, "pass_tokens": max(chunk, draw.choice([16, 32, 128])),
        "deterministic": kv_format == "int8" or draw.random() < 0.3,  # else a chunk sees its own tokens unrounded
        "draft_tokens": draw.choice([0, None]), "share_prefixes": draw.random() < 0.5,
    }  # fmt: skip
    requests = requests_of(draw)
    found = answers_of(folder, InferSettings(**common), requests)
    most = 1e-5 if kv_format == "same" else 5e-3  # a number that lies between two of 8 bits may be rounded to either
    for request in requests:
        tokens = found[request.name]
        ids = [chosen.token for chosen in tokens]
        expected = logprobs_of(model, [*request.prompt, *ids], kv_format)[len(request.prompt) - 1 :]
        for chosen, row in zip(tokens, expected, strict=False):
            for token, logprob in ((chosen.token, chosen.logprob), *chosen.top):
                assert abs(logprob - float(row[token])) < most, (kind, kv_format, common)
    drive = InferSettings(**common, kv_home="nvme", nvme_path=(tmp_path,))
    on_drive = answers_of(folder, drive, requests)
    for name, tokens in found.items():
        for here, there in zip(tokens, on_drive[name], strict=True):
            assert here.token == there.token and abs(here.logprob - there.logprob) < most, "pages on a drive"


@pytest.mark.more(after=1)
@pytest.mark.parametrize("seed", range(100, 106))
def test_any_company_has_the_same_bits_when_deterministic(model_of, seed):
    draw = random.Random(seed)
    folder, _ = model_of(list(MODELS)[seed % 3])
    common = {"context": 160, "device": "cpu", "ram_gib": 1, "page_tokens": 4, "chunk_tokens": 16, "pass_tokens": 32}
    formats = draw.choice(["same", "int8"])  # a beginning that was found is summed up in other pieces: no bits promised
    settings = InferSettings(**common, deterministic=True, share_prefixes=False, kv_format=formats)
    requests = requests_of(draw)
    together = answers_of(folder, settings, requests)
    for request in requests:
        assert answers_of(folder, settings, [request])[request.name] == together[request.name]


@pytest.mark.parametrize("kind", ["windows and sinks", pytest.param("windows and soft caps", marks=pytest.mark.more)])
def test_a_text_may_be_longer_than_the_pages_of_all_windows(model_of, kind):
    """What left a window is kept for who begins alike until a text, perhaps the same one, needs the room."""
    folder, model = model_of(kind)
    draw = random.Random(7)
    text = [draw.randrange(2, 280) for _ in range(200)]
    sampling = Sampling(0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    prompts = {"long": text, "again": text, "shorter": [*text[:60], 5], "longer": text + text[:40]}
    common = {"context": 260, "device": "cpu", "ram_gib": 1, "page_tokens": 4, "chunk_tokens": 16, "pass_tokens": 32}
    with closing(open_engine(str(folder), InferSettings(**common, max_sequences=2))) as opened:
        cache = opened.engine.scheduler.cache
        assert min(ledger.num_pages for ledger in cache.ledgers) * 4 < len(text)
        for name, prompt in prompts.items():
            (answer,) = opened.engine.generate([Request(name, tuple(prompt), sampling)])
            ids = [chosen.token for chosen in answer.tokens]
            expected = logprobs_of(model, [*prompt, *ids], "same")[len(prompt) - 1 :]
            for chosen, row in zip(answer.tokens, expected, strict=False):
                assert chosen.logprob is not None and abs(chosen.logprob - float(row[chosen.token])) < 1e-5
        assert opened.engine.counts.cached_tokens > 0, "the beginning is still shared"
