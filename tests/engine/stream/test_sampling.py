"""Greedy sampling by the streaming engine: the tokens that the whole model gives, one pass over the weights each."""

import pytest
import torch

from tests.engine.stream.training import fixtures, losses_of
from tests.flow.models import tiny_loaded
from tests.refused import refused

(build,) = fixtures
PROMPT = [5, 6, 7]
pytestmark = pytest.mark.usefixtures("one_thread")


def greedy(model, tokens: list[int], count: int) -> list[int]:
    """By the whole model at once, without dropout."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model.eval()(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(tokens) :].tolist()


def test_sampling_sees_every_update_and_no_dropout(build):
    engine = build("gpt2", dropout=0.2)
    losses_of(engine, range(2))
    tokens = engine.sample(PROMPT, 6, None)
    reference = tiny_loaded("gpt2").model
    assert tokens != greedy(reference, PROMPT, 6)  # as it was before the updates
    reference.load_state_dict(engine.loaded.model.state_dict())
    assert tokens == greedy(reference, PROMPT, 6)
    assert engine.loaded.model.training


def test_sampling_ends_with_the_end_token(build):
    engine = build("gpt2")
    tokens = engine.sample(PROMPT, 6, None)
    assert len(tokens) == 6
    assert engine.sample(PROMPT, 6, tokens[1]) == tokens[: tokens.index(tokens[1]) + 1]


def test_sampling_looks_back_no_further_than_the_model_knows_positions(build):
    engine = build("gpt2", n_positions=16)
    assert len(engine.sample(PROMPT, 20, None)) == 20


def test_a_prompt_without_tokens_is_refused(build):
    refused(ValueError, "at least one token", lambda: build("gpt2").sample([], 3, None))
