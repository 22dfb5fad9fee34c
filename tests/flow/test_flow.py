"""A pass of calls through the parts of a model gives what the whole model gives; hooks may replace hidden states."""

import pytest
import torch
from transformers import DynamicCache

from outcore.flow import Call, FixedWeights, Flow, Head, PartRunner, discover_units
from outcore.flow.check import why_not_streamed
from outcore.flow.check.trial import FORWARD, forward_difference
from outcore.flow.weights import WeightHomes, WeightPrefetcher
from outcore.staging import LaneSettings, PinnedPool, UploadLane
from outcore.staging.pool.pool import HostMemory
from tests.flow.models import padded_batch, plain_batch, tiny_loaded
from tests.refused import failing, refused

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def opened():
    """A function that opens a flow over a tiny model whose weights live in RAM."""
    closing = []

    def open_flow(model="llama", **fields):
        loaded = tiny_loaded(model, **fields)
        loaded.model.eval()
        units = discover_units(loaded)
        pool = PinnedPool(1 << 20, device=CPU, probe=False)
        lane = UploadLane(pool, None, CPU, LaneSettings(1 << 16, 2))
        homes = WeightHomes(units.all, HostMemory(pool), {u.index: u.layout.numel for u in units.all}, None)
        homes.adopt()
        runner = PartRunner(units)
        head = Head(runner, vocab_size=loaded.facts.vocab_size)
        closing.append((pool, lane))
        return Flow(runner, head, WeightPrefetcher(units, FixedWeights(homes), lane), CPU), loaded

    yield open_flow
    for _pool, lane in closing:
        lane.close()


@torch.no_grad()
def test_every_kind_of_call_in_one_pass(opened):
    flow, loaded = opened()
    first, second = plain_batch(2, 12, seed=1), padded_batch(3, 9, seed=2)
    places = torch.tensor([0, 5, 23])
    calls = [
        Call(first, "loss"), Call(first), Call(first, "logits", places), Call(second, "hidden"), Call(first, "nothing"),
    ]  # fmt: skip
    loss, last, some, hidden, nothing = flow.run(calls)
    assert [o.number for o in (loss, last, some, hidden, nothing)] == [0, 1, 2, 3, 4]
    whole = loaded.model(input_ids=first["input_ids"]).logits
    torch.testing.assert_close(last.logits, whole[:, -1])
    torch.testing.assert_close(some.logits, whole.flatten(0, 1)[places])
    expected = loaded.token_loss()(loaded.model, first)
    assert float(loss.ce_sum) == pytest.approx(float(expected.loss_sum), rel=1e-5)
    assert int(loss.n_tokens) == int(expected.n_tokens)
    decoder = loaded.model.model(input_ids=second["input_ids"], attention_mask=second["attention_mask"])
    counted = second["attention_mask"].bool()
    torch.testing.assert_close(hidden.hidden[counted], decoder.last_hidden_state[counted])
    assert nothing.hidden is nothing.logits is nothing.ce_sum is None


@torch.no_grad()
def test_a_hook_sees_every_part_and_may_replace_what_it_gives(opened):
    flow, _ = opened()
    call, seen = Call(plain_batch(1, 8)), []

    def zero_the_second(part, number, hidden_BTH):
        seen.append((part.index, number))
        return torch.zeros_like(hidden_BTH) if part.index == 2 and number == 1 else None

    same, other = flow.run([call, call], on_part=zero_the_second)
    count = len(flow.units.layers)
    assert seen == [(index, number) for index in range(count + 1) for number in (0, 1)]
    (plain,) = flow.run([call])
    assert torch.equal(same.logits, plain.logits) and not torch.equal(other.logits, plain.logits)


def test_a_hook_that_raises_or_a_caller_that_stops_ends_the_pass(opened):
    flow, _ = opened()
    call = Call(plain_batch(1, 8))
    (before,) = flow.run([call])
    refused(LookupError, "enough", lambda: list(flow.run([call], on_part=failing(LookupError("enough")))))
    stopped = flow.run([call, call])
    next(stopped)
    stopped.close()
    (after,) = flow.run([call])
    assert torch.equal(before.logits, after.logits)


@torch.no_grad()
def test_a_cache_given_to_the_decoder_serves_the_next_tokens(opened):
    flow, loaded = opened()
    ids = plain_batch(1, 10)["input_ids"]
    cache = DynamicCache(config=loaded.config)
    list(flow.run([Call({"input_ids": ids[:, :7]}, "nothing", inputs={"past_key_values": cache})]))
    rest = {"input_ids": ids[:, 7:], "position_ids": torch.arange(7, 10)[None]}
    (output,) = flow.run([Call(rest, inputs={"past_key_values": cache})])
    assert cache.get_seq_length() == 10
    torch.testing.assert_close(output.logits, loaded.model(input_ids=ids).logits[:, -1])


def test_the_forward_trial_compares_logits():
    loaded = tiny_loaded("llama")
    assert why_not_streamed(loaded) == "" and FORWARD.what == "logits"
    assert forward_difference(loaded, padded_batch()) < 1e-5
