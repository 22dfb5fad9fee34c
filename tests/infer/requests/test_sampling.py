"""Choosing tokens: greedy, cut and drawn exactly, by a generator that keeps nothing."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from outcore.infer.requests import Row, Sampling, choose, derived_seed, own_defaults, seed_of
from outcore.infer.requests.draws import uniform


def rows(count: int, sampling: Sampling, **more) -> list[Row]:
    return [Row(sampling, seed=i, position=7, **more) for i in range(count)]


def frequencies(logits: torch.Tensor, sampling: Sampling, count: int = 4000) -> dict[int, float]:
    chosen = choose(logits.expand(count, -1), rows(count, sampling))
    return {token: n / count for token, n in Counter(c.token for c in chosen).items()}


def test_numbers_depend_on_seed_and_position_alone():
    assert uniform(1, 2) == uniform(1, 2)
    numbers = [uniform(seed, place) for seed in range(40) for place in range(50)]
    assert len(set(numbers)) == 2000 and all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 2000 - 0.5) < 0.02
    assert derived_seed(5, 0) == 5 and len({derived_seed(5, i) for i in range(100)}) == 100
    assert seed_of("a") != seed_of("b")


def test_greedy_takes_the_first_likeliest():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    for temperature in (0, 1e-40, 1e-300):
        assert choose(logits, rows(1, Sampling(temperature=temperature)))[0].token == 1


def test_draws_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    for temperature in (0.7, 1.0, 2.0):
        expected = torch.softmax(logits / temperature, 0)
        found = frequencies(logits, Sampling(temperature=temperature))
        assert all(abs(found.get(i, 0) - p) < 0.03 for i, p in enumerate(expected.tolist()))


def test_cuts():
    logits = torch.tensor([0.0, 4.0, 3.0, 2.0, -9.0])
    assert set(frequencies(logits, Sampling(top_k=2))) == {1, 2}
    assert set(frequencies(logits, Sampling(top_p=0.5))) == {1}
    assert set(frequencies(logits, Sampling(top_p=0.8))) == {1, 2}
    assert set(frequencies(logits, Sampling(min_p=0.3))) == {1, 2}
    found = frequencies(logits, Sampling(top_k=2))
    assert abs(found[1] - 1 / (1 + math.exp(-1))) < 0.03


def test_a_row_is_not_touched_by_its_neighbours():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    settings = [Sampling(temperature=0), Sampling(top_k=3), Sampling(top_p=0.5, seed=1), Sampling(min_p=0.2)]
    all_rows = [Row(settings[i % 4], seed=i, position=i) for i in range(6)]
    together = [c.token for c in choose(logits, all_rows)]
    alone = [choose(logits[i : i + 1], [all_rows[i]])[0].token for i in range(6)]
    assert together == alone


def test_penalties_biases_masks():
    logits = torch.tensor([[1.0, 2.0, 3.0, -1.0]])

    def greedy(**fields) -> int:
        history = {name: fields.pop(name) for name in ("prompt", "answer", "forbidden", "mask") if name in fields}
        return choose(logits, rows(1, Sampling(temperature=0, **fields), **history))[0].token

    assert greedy() == 2
    assert greedy(presence_penalty=1.5, answer=[2]) == 1
    assert greedy(frequency_penalty=0.6, answer=[2, 2]) == 1
    assert greedy(frequency_penalty=0.6, answer=[2]) == 2
    assert greedy(repetition_penalty=2.0, prompt=[2]) == 1
    assert greedy(logit_bias={3: 5.0}) == 3
    assert greedy(forbidden=[2]) == 1
    assert greedy(mask=torch.tensor([0b1001], dtype=torch.uint8)) == 0


def test_logprobs_are_the_models_own():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    found = choose(logits, rows(1, Sampling(temperature=0, logit_bias={0: 50.0}, logprobs=2)))[0]
    expected = torch.log_softmax(logits[0], 0).tolist()
    assert found.token == 0 and found.logprob == pytest.approx(expected[0])
    assert [token for token, _ in found.top] == [2, 1]
    assert [p for _, p in found.top] == pytest.approx([expected[2], expected[1]])


@pytest.mark.parametrize("fields, word", [
    ({"temperature": -1}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"), ({"min_p": 1.5}, "min_p"), ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 300}, "min_tokens"), ({"stop": ("",)}, "stop"), ({"logit_bias": {3: 101}}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"), ({"seed": -1}, "seed"), ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
])  # fmt: skip
def test_refused(fields, word):
    with pytest.raises(ValueError, match=word):
        Sampling(**fields)


def test_what_makers_recommend():
    def of(**config):
        return own_defaults(SimpleNamespace(generation_config=SimpleNamespace(do_sample=True, **config)), Sampling())

    assert of(temperature=0.5, top_k=-1, top_p=0.9) == Sampling(temperature=0.5, top_p=0.9), "-1, as some write, is all"
    with pytest.raises(ValueError, match=r"generation_config.*top_p is 0\.0"):
        of(top_p=0.0)
