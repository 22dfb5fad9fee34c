"""Checkpoints of the streaming engine: resumed bit by bit, in another format, from DeepSpeed's, exported, refused."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from outcore.checkpoint.manifest import crc32_of
from outcore.checkpoint.shards import CheckpointError, TensorPlan, write_shard
from outcore.model.facts import checkpoint_name
from tests.engine.inside import parts_of
from tests.engine.stream.training import (
    LR,
    TINY,
    adamw_of,
    batches_of,
    fixtures,
    losses_of,
    plain_training,
    same,
    weights_of,
)
from tests.flow.models import tiny_loaded
from tests.refused import refused

(build,) = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.more(after=2)
@pytest.mark.parametrize("states", ["fp32", "split", "fp32_m8", "split8", "fp24_m8"])
def test_saved_and_resumed_training_goes_on_bit_by_bit(build, tmp_path, states):
    settings = replace(TINY, states=states, max_grad_norm=0.5)
    engine = build("gpt2", settings, dtype=torch.bfloat16, dropout=0.1)
    losses_of(engine, range(3))
    files = {}
    state = json.loads(json.dumps(engine.save(tmp_path, lambda path, crc: files.update({path.name: crc}))))
    assert state["engine"] == "stream" and state["updates"] == 3 and state["optimizer_state"]
    assert all(crc32_of(tmp_path / name) == crc for name, crc in files.items())
    written = sum((tmp_path / name).stat().st_size for name in files)
    assert engine.facts().state_bytes <= written < engine.facts().state_bytes + 65536
    on = losses_of(engine, range(3, 6))
    resumed = build(
        "gpt2", replace(settings, activations="ram", chunk_numel=1 << 12), dtype=torch.bfloat16, dropout=0.1, seed=9
    )
    resumed.load(tmp_path, state)
    assert same((losses_of(resumed, range(3, 6)), weights_of(resumed)), (on, weights_of(engine)))


@pytest.mark.more(after=1)
@pytest.mark.parametrize("before", ["fp32", "split8"])
def test_masters_of_24_bits_begin_with_the_parameters_of_the_checkpoint(build, tmp_path, before):
    engine = build("llama", replace(TINY, states=before), dtype=torch.bfloat16)
    losses_of(engine, range(3))
    state = engine.save(tmp_path, lambda path, crc: None)
    resumed = build("llama", replace(TINY, states="fp24_m8"), dtype=torch.bfloat16, seed=9)
    resumed.load(tmp_path, state)
    first, second = ((weights_of(e), losses_of(e, (3, 4))) for e in (engine, resumed))
    assert all(torch.equal(first[0][n], second[0][n]) for n in first[0]) and first[1][0] == second[1][0]
    assert first[1][1] == pytest.approx(second[1][1], rel=2e-3)


def test_a_checkpoint_of_deepspeed_is_resumed(build, tmp_path):
    """The files are built as DeepSpeed's engine writes them; the next steps are those of plain AdamW from there."""
    reference = tiny_loaded("llama", seed=3)
    optimizer = adamw_of(reference.model.parameters())
    plain_training(reference, 4, max_norm=1.0, optimizers=[optimizer])
    parameters = {checkpoint_name(n): p for n, p in reference.model.named_parameters()}
    plans = [TensorPlan(n, torch.float32, tuple(p.shape)) for n, p in parameters.items()]
    for family in ("model", "master", "exp_avg", "exp_avg_sq"):
        values = {
            n: p.detach() if family in ("model", "master") else optimizer.state[p][family]
            for n, p in parameters.items()
        }
        write_shard(tmp_path / f"{family}-00001-of-00001.safetensors", plans, values.__getitem__)
    engine = build("llama")
    engine.load(tmp_path, {"engine": "deepspeed", "updates": 4, "optimizer_state": True, "loss_scaler": {}})
    assert engine.updates == 4
    losses, _ = plain_training(reference, range(4, 8), max_norm=1.0, optimizers=[optimizer])
    assert losses_of(engine, range(4, 8)) == pytest.approx(losses, rel=1e-4)


def test_checkpoints_that_do_not_fit_are_refused_before_anything_changes(build, tmp_path):
    engine = build("llama")
    state = engine.save(tmp_path, lambda path, crc: None)
    before = weights_of(engine)
    refused(CheckpointError, "weights only", lambda: engine.load(tmp_path, {**state, "optimizer_state": False}))
    refused(CheckpointError, "another model", lambda: build("gpt2").load(tmp_path, state))
    other = build("llama", intermediate_size=64)
    refused(CheckpointError, "has shape", lambda: other.load(tmp_path, state))
    (tmp_path / "exp_avg-00001-of-00001.safetensors").unlink()
    refused(CheckpointError, "not whole", lambda: engine.load(tmp_path, state))
    after = weights_of(engine)
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_second_moments_below_zero_are_refused_and_minus_zero_is_zero(build, tmp_path):
    engine = build("llama")
    state = engine.save(tmp_path, lambda path, crc: None)
    homes = parts_of(engine).homes
    name = next(iter(homes.weights.names()))
    path = tmp_path / "exp_avg_sq-00001-of-00001.safetensors"
    values = load_file(path)
    for value, bits in ((-0.0, 0), (-1e-12, None)):
        values[name].view(-1)[7] = value
        save_file(values, path)
        if bits is None:
            with pytest.raises(CheckpointError, match=f"exp_avg_sq of {re.escape(name)} is below zero"):
                engine.load(tmp_path, state)
        else:
            engine.load(tmp_path, state)
            assert int(homes.read_state(name, "exp_avg_sq").view(torch.int32).view(-1)[7]) == bits


def test_exported_model_is_read_by_transformers(build, tmp_path):
    import transformers

    engine = build("qwen2")
    engine.train_step(batches_of(0), LR)
    engine.export(tmp_path / "final")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    weights = weights_of(engine)
    assert all(torch.equal(p, weights[n]) for n, p in again.named_parameters())
    assert (tmp_path / "final" / "config.json").exists()
