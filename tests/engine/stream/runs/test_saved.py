"""Layers whose forward is saved: no second forward, and the same bits without it."""

from dataclasses import replace

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.sizing.residents import SPARE_BYTES, DeviceUse, num_saved
from tests.engine.inside import parts_of
from tests.engine.stream.runs.test_residents import ALL, longer, saved, train
from tests.engine.stream.training import LR, TINY, batches_of, fixtures, freeze_most
from tests.refused import refused

(build,) = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")
TOLD = replace(TINY, step_tokens=(54, 27), row_tokens=27)
SAVING = replace(TOLD, saved_bytes=ALL)


def recomputed(engine) -> list[int]:
    """Layers whose forward is made again from now on."""
    backward, seen = parts_of(engine).schedule.backward, []
    original = backward.layer

    def layer(index, *args):
        seen.append(index)
        return original(index, *args)

    backward.layer = layer
    return seen


def num_saving(engine) -> int:
    return parts_of(engine).schedule.saved.num_layers


@pytest.mark.more(after=2)
@pytest.mark.parametrize("model, dtype, changes", [
    ("llama", torch.bfloat16, {"states": "split", "max_grad_norm": 0.05, "resident_bytes": ALL}),
    ("gpt2", torch.float16, {"initial_loss_scale": 64.0, "activations": "ram"}),
    ("mixtral", torch.float32, {"num_layer_buffers": 1, "max_grad_norm": 0.0}),
])  # fmt: skip
def test_no_second_forward_and_the_same_bits(build, tmp_path, model, dtype, changes):
    """Dropout, routers' losses, weights that come again or stay; steps of two micro-batches and of one."""
    found = []
    for limit in (0, ALL):
        engine = build(model, replace(TOLD, saved_bytes=limit, **changes), dtype=dtype, dropout=0.1)
        losses = train(engine, 3)
        again, num_layers = recomputed(engine), len(parts_of(engine).units.layers)
        losses += train(engine, 1, 3) + train(engine, 1, 4, batches=lambda step: batches_of(step, 1))
        assert sorted(again) == ([] if limit else sorted([*range(num_layers)] * 3))
        assert num_saving(engine) == (num_layers if limit else 0)
        found.append((losses, saved(engine, tmp_path / str(limit))[1]))
    assert found[0] == found[1]


def test_saved_weights_are_those_that_backward_brings(build):
    """The one buffer for layers is overwritten in between; frozen layers below have no backward and are not saved."""

    settings = replace(SAVING, num_layer_buffers=1)
    engine = build("llama", settings, prepare=freeze_most)
    assert train(engine, 5) == train(build("llama", TOLD, prepare=freeze_most), 5)
    assert num_saving(engine) == 1


def test_layers_are_saved_as_far_as_memory_reaches_and_from_the_top(build):
    engine = build("llama", SAVING)
    assert "saved: the last layers, where memory is idle after two steps" in engine.describe()
    train(engine, 4)
    one_bytes = parts_of(engine).schedule.saved.peak_bytes // 2
    fewer = build("llama", replace(TOLD, saved_bytes=one_bytes * 19 // 10))
    losses, again = train(fewer, 3), recomputed(fewer)
    assert losses + train(fewer, 1, 3) == train(build("llama"), 4)
    assert again == [0, 0] and "saved: the last 1 layers are not computed again" in fewer.describe()


def test_a_larger_step_saves_nothing_until_idle_memory_is_known_again(build):
    engine, found = build("llama", SAVING), []
    parts_of(engine).residents.measure = lambda: DeviceUse(SPARE_BYTES + 100 * MIB, 0, 60 * MIB)
    for step in range(8):
        found += [(train(engine, 1, step, batches=longer), num_saving(engine))]
    assert [count for _, count in found] == [0, 0, 1, 2, 0, 0, 2, 2]
    assert [loss for (loss,), _ in found] == train(build("llama"), 8, batches=longer)


def test_memory_short_in_a_step_is_given_back_and_the_step_made_again(build, caplog):
    engine, other = build("llama", SAVING), build("llama")
    assert train(engine, 3) == train(other, 3)
    kept = parts_of(engine).schedule.saved
    original = kept.forward

    def refuses(*args):
        original(*args)
        raise torch.OutOfMemoryError("CUDA out of memory")

    kept.forward = refuses
    assert train(engine, 2, 3) == train(other, 2, 3)
    assert num_saving(engine) == 0 and "computed again in backward, instead of kept: memory was short" in caplog.text


@pytest.mark.more
def test_nothing_is_saved_in_tiles_or_where_no_step_is_told(build):
    for settings in (replace(SAVING, tiling="on", tile_bytes=1024), replace(TINY, saved_bytes=ALL), TOLD):
        engine = build("llama", settings)
        train(engine, 3)
        assert num_saving(engine) == 0 and "saved" not in engine.describe()
    refused(ValueError, "saved_bytes must not be negative", lambda: replace(TINY, saved_bytes=-1))


@pytest.mark.slow
def test_compiled_layers_are_saved_by_what_the_compiler_keeps(build):
    """fp32 on the CPU; losses agree, and fewer bytes are kept than by autograd alone."""
    found = {}
    for compile in ("on", "off"):
        engine = build("llama", replace(SAVING, compile=compile))
        losses, again = train(engine, 3), recomputed(engine)
        found[compile] = (losses + train(engine, 2, 3), parts_of(engine).schedule.saved.peak_bytes)
        assert again == []
    assert found["on"][0] == pytest.approx(found["off"][0], rel=1e-5)
    assert found["on"][1] < found["off"][1]


def test_the_rule_of_what_is_saved():
    assert [num_saved(100, idle, 3) for idle in (-5, 109, 110, 219, 220, 10**6)] == [0, 0, 1, 1, 2, 3]
    assert num_saved(100, 10**6, 0) == 0


def test_a_poisoned_pass_forgets_what_it_saved(build):
    engine = build("llama", SAVING)
    train(engine, 3)
    saved_forwards, head = parts_of(engine).schedule.saved, parts_of(engine).schedule.head
    head.run = lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("lost"))
    refused(RuntimeError, "lost", lambda: engine.train_step(batches_of(3), LR))
    assert not any(saved_forwards.holds(layer, m) for layer in range(2) for m in range(2))
