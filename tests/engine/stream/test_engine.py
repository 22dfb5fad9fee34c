"""The streaming engine on the CPU: equal to plain AdamW, and what it refuses, skips and samples."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from outcore.common.quantities import MIB
from outcore.engine.base import NonFiniteLossError
from outcore.flow.parts import StreamUnsupported
from tests.engine.inside import parts_of
from tests.engine.stream.training import (
    LR,
    TINY,
    batches_of,
    fixtures,
    freeze_most,
    losses_of,
    plain_training,
    weights_of,
)
from tests.flow.models import padded_batch, plain_batch, set_dropout, tiny_loaded
from tests.refused import refused

(build,) = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.more(after=2)
@pytest.mark.parametrize(("model", "max_norm"), [
    *(("llama", 0.5), ("mixtral", 0.5), ("llama", 0.0), ("gpt2", 0.5)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gemma3_text", 0.5), ("mixtral", 0.0))),
])  # fmt: skip
def test_twenty_steps_equal_plain_adamw(build, model, max_norm):
    reference = tiny_loaded(model)
    set_dropout(reference.model, 0.0)
    losses, norms = plain_training(reference, 20, max_norm=max_norm, batches=lambda step: batches_of(step % 3))
    engine = build(model, replace(TINY, max_grad_norm=max_norm))
    results = [engine.train_step(batches_of(step % 3), LR) for step in range(20)]
    assert [r.loss for r in results] == pytest.approx(losses, rel=2e-4)
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=2e-3)
    assert max(norms) > 2.0  # the clipping is at work
    assert results[18].loss < 0.9 * results[0].loss and not any(r.skipped for r in results)
    assert all(r.tokens > 0 and r.phase_s["forward"] > 0 and r.phase_s["backward"] > 0 for r in results)
    start = dict(tiny_loaded(model).model.named_parameters())
    expected = dict(reference.model.named_parameters())
    with torch.no_grad():  # a gradient that is zero but for rounding moves by +-lr: compare all updates together
        off = sum(float((w - expected[n]).square().sum()) for n, w in weights_of(engine).items())
        moved = sum(float((expected[n] - start[n]).square().sum()) for n in expected)
    assert (off / moved) ** 0.5 < 0.02
    assert engine.updates == 20


def test_a_step_tells_which_part_it_is_at(build):
    engine, seen = build("llama"), []
    for layer in engine.loaded.model.model.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(engine.facts().doing))
    engine.train_step(batches_of(0)[:1], LR)
    names = [unit.name for unit in parts_of(engine).flow.units.layer_units]
    assert len(names) > 1
    assert seen == [f"forward, {name}" for name in names] + [f"backward, {name}" for name in reversed(names)]


def test_many_copies_of_a_micro_batch_are_that_micro_batch(build):
    """Gradients are added up in fp32 unless told otherwise: each 1/32 of them is exact in bf16, and so is their sum."""
    found = {}
    for accumulate, count in (("fp32", 1), ("fp32", 32), ("weights", 32)):
        engine = build("llama", replace(TINY, accumulate=accumulate, logits_chunk_bytes=MIB), dtype=torch.bfloat16)
        norm = engine.train_step([plain_batch(2, 12, seed=4)] * count, LR).grad_norm
        found[accumulate, count] = norm, weights_of(engine)
    one, many, rounded = found.values()
    assert many[0] == one[0] and all(torch.equal(one[1][n], many[1][n]) for n in one[1])
    assert rounded[0] != one[0]


def test_evaluation_sees_every_update_and_no_dropout(build):
    engine = build("gpt2", replace(TINY, eval_group=2), dropout=0.2)
    reference = tiny_loaded("gpt2")
    for step in range(2):
        engine.train_step(batches_of(step), LR)
    held_out = [padded_batch(2, 14, seed=900 + i) for i in range(5)]
    found = engine.evaluate(iter(held_out))
    reference.model.load_state_dict(engine.loaded.model.state_dict())
    reference.model.eval()
    with torch.no_grad():
        sums = [reference.token_loss()(reference.model, batch) for batch in held_out]
    assert found.tokens == sum(int(s.n_tokens) for s in sums)
    assert found.loss == pytest.approx(sum(float(s.loss_sum) for s in sums) / found.tokens, rel=1e-5)
    assert engine.evaluate([]).tokens == 0
    assert engine.loaded.model.training
    before = torch.default_generator.get_state()
    engine.train_step(batches_of(2), LR)
    assert torch.equal(before, torch.default_generator.get_state())


def test_an_eps_that_8_bit_moments_cannot_have_is_refused_with_the_settings():
    with pytest.raises(ValueError, match="8-bit moments need eps of at least 1e-11, got 1e-12"):
        replace(TINY, states="fp32_m8", eps=1e-12)


def test_frozen_parameters_are_streamed_and_left_alone(build, tmp_path):
    reference = tiny_loaded("llama")
    freeze_most(reference.model)
    losses, _ = plain_training(reference, 5, max_norm=1.0)
    engine = build("llama", prepare=freeze_most)
    before = weights_of(engine)
    assert losses_of(engine, range(5)) == pytest.approx(losses, rel=1e-4)
    after = weights_of(engine)
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed == {n for n in before if "layers.1." in n and "self_attn" in n}
    engine.save(tmp_path, lambda path, crc: None)
    assert set(load_file(tmp_path / "master-00001-of-00001.safetensors")) == changed


def test_a_gradient_that_is_not_finite_skips_the_whole_step(build):
    engine = build("llama")
    engine.train_step(batches_of(0), LR)
    before = weights_of(engine)
    poison(engine, 1)
    result = engine.train_step(batches_of(1), LR)
    assert result.skipped and engine.updates == 1
    after = weights_of(engine)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert not engine.train_step(batches_of(1), LR).skipped
    poison(engine, 100)
    with pytest.raises(NonFiniteLossError, match="in a row"):
        for step in range(20):
            engine.train_step(batches_of(step), LR)


def poison(engine, times, value=float("inf")):
    """The next `times` gradients of a layer have this value in them."""
    runner = parts_of(engine).schedule.backward
    original = type(runner).layer
    left = [times]

    def layer_backward(*args):
        grad = original(runner, *args)
        if left[0] > 0:
            left[0] -= 1
            args[-1].flat[3] = value
        return grad

    runner.layer = layer_backward


@pytest.mark.parametrize(("value", "said"), [(float("inf"), "inf"), (1e19, r"1e\+19")])
def test_without_clipping_a_gradient_whose_square_overflows_is_fatal(build, value, said):
    """The same limit in both modes, and in the step in which it comes."""
    for update in ("deferred", "immediate"):
        engine = build("llama", replace(TINY, max_grad_norm=0.0, update=update))
        engine.train_step(batches_of(0), LR)
        before = weights_of(engine)
        poison(engine, 1, value)
        if update == "immediate":
            with pytest.raises(NonFiniteLossError, match=rf"norm became {said}.*resume from the last checkpoint"):
                engine.train_step(batches_of(1), LR)
            parts_of(engine).updates._pending.clear()
        else:
            assert engine.train_step(batches_of(1), LR).skipped
            after = weights_of(engine)
            assert all(torch.equal(before[n], after[n]) for n in before)
    clipped = build("llama", replace(TINY, max_grad_norm=1.0))
    poison(clipped, 1, value)
    assert clipped.train_step(batches_of(1), LR).skipped == (said == "inf"), "clipping makes a large one small enough"


def test_fp16_overflow_is_skipped_and_the_scale_falls_and_recovers(build, tmp_path):
    settings = replace(TINY, initial_loss_scale=2.0**24, loss_scale_hysteresis=1, loss_scale_window=3)
    engine = build("llama", settings, dtype=torch.float16)
    results, scales = [], [engine._scaler.cur_scale]
    for _ in range(24):
        results.append(engine.train_step(batches_of(0), 1e-3))
        scales.append(engine._scaler.cur_scale)
    skipped = [r.skipped for r in results]
    assert skipped[0] and not all(skipped) and engine.updates == skipped.count(False)
    done = [r for r in results if not r.skipped]
    assert done[-1].loss < done[0].loss
    scale = scales[-1]
    fell = [after < before for before, after in pairwise(scales)]
    rose = [after > before for before, after in pairwise(scales)]
    assert fell == skipped and any(rose[fell.index(True) :])
    state = engine.save(tmp_path, lambda path, crc: None)
    assert set(state["loss_scaler"]) == {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}
    other = build("llama", settings, dtype=torch.float16)
    other.load(tmp_path, state)
    assert other._scaler.cur_scale == scale
    assert other.train_step(batches_of(1), 1e-3).loss == engine.train_step(batches_of(1), 1e-3).loss


def test_a_loss_that_is_not_finite_is_refused(build):
    engine = build("llama")
    with torch.no_grad():
        engine.loaded.model.lm_head.weight[0, 0] = float("nan")
    before = weights_of(engine)
    refused(NonFiniteLossError, "no state was updated", lambda: engine.train_step(batches_of(0), LR))
    after = weights_of(engine)
    assert all(torch.equal(before[n], after[n]) or "lm_head" in n for n in before)


@pytest.mark.parametrize("max_norm", [0.5, 0.0])
def test_a_global_batch_without_targets_is_refused_and_nothing_is_lost(build, tmp_path, caplog, max_norm):
    """Dropout too goes on with the same numbers, and the update before it, perhaps under way, is kept."""
    empty = {**plain_batch(), "labels": torch.full_like(plain_batch()["labels"], -100)}
    found = []
    for batches in ([], [[empty], [empty, empty]]):
        engine = build("gpt2", replace(TINY, max_grad_norm=max_norm), dropout=0.1)
        engine.train_step(batches_of(0), LR)
        for batch in batches:
            with pytest.raises(ValueError, match=r"labels are masked.*No step was made.*--seq_length"):
                engine.train_step(batch, LR)
        assert engine.updates == 1
        crcs, folder = {}, tmp_path / f"{len(batches)} refused"
        folder.mkdir()
        state = engine.save(folder, lambda path, crc, crcs=crcs: crcs.update({path.name: crc}))
        losses = [engine.train_step(micro, LR).loss for micro in (batches_of(1), [empty, plain_batch(seed=1)])]
        for batch in batches:
            with pytest.raises(ValueError, match="no token"):
                engine.train_step(batch, LR)
        assert not engine._failed  # closing applies the update that is pending
        engine.close()
        found.append((state, crcs, losses))
    assert found[0] == found[1] and found[0][1]
    assert not [record for record in caplog.records if record.name.startswith("outcore")]


def test_bad_input_is_refused(build):
    refused(ValueError, "cannot clip", lambda: replace(TINY, update="immediate"))
    refused(ValueError, "fp16", lambda: replace(TINY, update="immediate", max_grad_norm=0.0).is_deferred(torch.float16))
    refused(ValueError, "staging_bytes", lambda: replace(TINY, staging_bytes=4096))
    refused(ValueError, "activations", lambda: replace(TINY, activations="nvme"))  # pyright: ignore[reportArgumentType]
    refused(ValueError, "bf16", lambda: build("llama", replace(TINY, states="split"), dtype=torch.float16))
    with pytest.raises(StreamUnsupported, match="several types"):
        build("llama", prepare=lambda model: model.model.norm.to(torch.bfloat16))


def test_description_and_closing(build):
    engine = build("gpt2")
    text = engine.describe()
    assert "embedding and head tied" in text and "under the next forward" in text and "torch" in text
    assert (engine.name, engine.rank, engine.world_size) == ("stream", 0, 1)
    engine.train_step(batches_of(0), LR)
    engine.close()
    engine.close()


PROMPT = [5, 6, 7]


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
    assert engine.sample(PROMPT, 6, {tokens[1], -1}) == tokens[: tokens.index(tokens[1]) + 1]


def test_sampling_looks_back_no_further_than_the_model_knows_positions(build):
    engine = build("gpt2", n_positions=16)
    assert len(engine.sample(PROMPT, 20, None)) == 20


def test_a_prompt_without_tokens_is_refused(build):
    refused(ValueError, "at least one token", lambda: build("gpt2").sample([], 3, None))
