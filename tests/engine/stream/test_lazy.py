"""Models that are made without memory and get their weights layer by layer: the same bits as a whole load."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from outcore.common.quantities import MIB
from outcore.engine.stream.check.gradients import why_config_not_trained, why_not_trained
from outcore.flow.layers import draws_random_numbers
from outcore.flow.parts import StreamUnsupported, discover_units
from outcore.formats import open_packed
from outcore.model import LoraSettings, ModelSettings, load_model, resolve_source
from outcore.model.facts import checkpoint_name, model_class_of, model_facts
from outcore.model.trial.shrink import shrink_config
from tests.engine.inside import parts_of
from tests.engine.stream.training import fixtures
from tests.flow.models import TINY_SETTINGS, needs, plain_batch
from tests.forked import run_script
from tests.refused import refused

(built,) = fixtures
TINY = replace(TINY_SETTINGS, staging_bytes=4 * MIB, slot_bytes=8192, weight_read_ahead_bytes=64 * 1024)
OVERRIDES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip
LORA = LoraSettings(r=4, alpha=8, dropout=0.0)
ATTENTION_LORA = replace(LORA, target_modules=("q_proj", "v_proj"))
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def build(tmp_path, engines, built):
    def make(loaded, **changes):
        where = {"nvme_path": str(tmp_path / f"drive{len(engines)}")} if "weight_ram_bytes" in changes else {}
        return built(loaded, replace(TINY, **where, **changes))

    return make


def feed_of(settings: ModelSettings):
    feed = load_model(settings, lazy=True).feed
    assert feed is not None
    return feed


def compare(build, settings: ModelSettings, **changes):
    """Weights, losses and buffers of a lazy load and of a whole one; returns the lazy engine."""
    whole, lazy = load_model(settings), load_model(settings, lazy=True)
    assert lazy.feed is not None and whole.feed is None and lazy.facts == whole.facts
    base = {n: p for n, p in lazy.model.named_parameters() if "lora_" not in n}
    assert sum(p.untyped_storage().nbytes() for p in base.values()) <= 8 * len(base)
    assert lazy.model.state_dict().keys() == whole.model.state_dict().keys()
    buffers = dict(lazy.model.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in whole.model.named_buffers())
    assert [p.requires_grad for p in lazy.model.parameters()] == [p.requires_grad for p in whole.model.parameters()]
    expected = {checkpoint_name(n): p.detach().clone() for n, p in whole.model.named_parameters()}
    engine, other = build(lazy, **changes), build(whole)
    homes = parts_of(engine).homes
    assert set(homes.weights.names()) == expected.keys()
    for name, value in expected.items():
        assert torch.equal(homes.weights.read(name), value), name
    batches = [plain_batch(2, 12, seed=1)]
    for _ in range(2):
        assert engine.train_step(batches, 1e-3).loss == other.train_step(batches, 1e-3).loss
    return engine


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("preset", "overrides", "lora"), [
    ("llama-1b", {}, None), ("llama-1b", {"tie_word_embeddings": True}, LORA), ("tiny-moe", {}, None),
])  # fmt: skip
def test_from_scratch_gives_the_same_bits_as_whole(build, preset, overrides, lora):
    fields = OVERRIDES | overrides
    settings = ModelSettings(preset=preset, precision="bf16", seq_length=64, config_overrides=fields, lora=lora)
    compare(build, settings, **({"weight_ram_bytes": 60_000} if lora else {}))


def folder_of(tmp_path, model_type: str, shards: int = 3, dtype=torch.bfloat16, **fields):
    """A published checkpoint of a tiny model, in several shards, as save_pretrained writes it."""
    config = shrink_config(transformers.AutoConfig.for_model(model_type))
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(3)
    model = model_class_of(config)._from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path / model_type, max_shard_size=size // shards)
    return tmp_path / model_type


def settings_for(folder, precision="bf16", **fields) -> ModelSettings:
    return ModelSettings(
        model_name_or_path=str(folder), precision=precision, seq_length=16, attn_implementation="eager", **fields
    )


@pytest.mark.more(after=2)
@pytest.mark.parametrize(("model_type", "lora"), [
    ("llama", LORA), ("gpt2", None), ("mixtral", None), ("qwen3_moe", ATTENTION_LORA), ("gemma3_text", None),
    ("bloom", None),
])  # fmt: skip
def test_shards_of_trained_models_give_the_same_bits_as_from_pretrained(build, tmp_path, model_type, lora):
    """gpt2 and bloom have names without the base model's prefix, mixtures one tensor per expert, gemma ties."""
    folder = folder_of(tmp_path, model_type)
    assert len(list(folder.glob("*.safetensors"))) > 1
    engine = compare(build, settings_for(folder, lora=lora), **({"weight_ram_bytes": 40_000} if lora else {}))
    if model_type == "qwen3_moe":
        engine.export(tmp_path / "final")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.bfloat16)
        state = again.state_dict()
        homes = parts_of(engine).homes
        norms = [name for name in homes.weights.names() if "layernorm" in name]
        assert norms and all(torch.equal(state[name], homes.weights.read(name)) for name in norms)


@pytest.fixture
def with_more_parts(tmp_path) -> ModelSettings:
    """Qwen3.5 is published with a vision tower."""
    torch.manual_seed(3)
    config = shrink_config(transformers.AutoConfig.for_model("qwen3_5"))
    transformers.Qwen3_5ForConditionalGeneration(config).bfloat16().save_pretrained(tmp_path / "published")
    assert json.loads((tmp_path / "published" / "config.json").read_text())["model_type"] == "qwen3_5"
    return settings_for(tmp_path / "published")


def test_the_text_part_is_the_model(with_more_parts):
    """As transformers makes it for a causal model."""
    loaded = load_model(with_more_parts, lazy=True)
    assert resolve_source(with_more_parts).config.model_type == "qwen3_5_text"
    found = {checkpoint_name(n) for n, _ in loaded.model.named_parameters()}
    assert loaded.feed is not None
    assert found == loaded.feed.names == {n for values in loaded.feed.groups() for n in values}
    assert why_not_trained(loaded) == ""


@pytest.mark.slow
def test_the_text_part_trains(build, with_more_parts):
    """Its linear attention is a loop over tokens on a CPU."""
    compare(build, with_more_parts)


def test_adapters_on_fused_experts_that_the_caller_made_have_names_of_their_own(build, tmp_path):
    settings = settings_for(folder_of(tmp_path, "qwen3_moe"), lora=LORA)
    assert why_not_trained(load_model(settings, lazy=True)) == ""
    loaded = load_model(replace(settings, lora=None))
    model: Any = loaded.model
    config = LoraConfig(r=4, target_parameters=["gate_up_proj", "down_proj"])
    network: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    engine = build(replace(loaded, model=network, facts=model_facts(network)))
    names = [name for name in parts_of(engine).homes.weights.names() if "lora_A" in name]
    assert {name.split("experts.")[1] for name in names} == {"lora_A.weight", "base_layer.lora_A.weight"}
    assert engine.train_step([plain_batch()], 1e-2).loss > 0


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", pytest.param("flint", marks=needs("flint"))])
def test_types_are_those_of_from_pretrained(tmp_path, model_type):
    """Routers, and what else transformers keeps in fp32; that is why such a model is not streamed in bf16."""
    settings = settings_for(folder_of(tmp_path, model_type))
    whole, lazy = load_model(settings), load_model(settings, lazy=True)
    types = {name: p.dtype for name, p in whole.model.named_parameters()}
    assert set(types.values()) == {torch.float32, torch.bfloat16}
    assert {name: p.dtype for name, p in lazy.model.named_parameters()} == types
    for loaded in (whole, lazy):
        with pytest.raises(StreamUnsupported, match="several types, float32 among bfloat16"):
            discover_units(loaded)


def test_buffers_keep_the_type_that_from_pretrained_gives_them(tmp_path):
    """DeepSeek-V3's choice of experts hangs on a bias in fp32 that is no parameter."""
    folder, names = folder_of(tmp_path, "deepseek_v3"), []
    for shard in folder.glob("*.safetensors"):
        weights = load_file(shard)
        biases = [name for name in weights if "e_score_correction_bias" in name]
        names += biases
        weights |= {name: torch.randn(weights[name].shape) for name in biases}
        save_file(weights, shard, metadata={"format": "pt"})
    assert names
    whole, lazy = (load_model(settings_for(folder), lazy=how).model for how in (False, True))
    for name in names:
        assert whole.get_buffer(name).dtype == torch.float32
        torch.testing.assert_close(lazy.get_buffer(name), whole.get_buffer(name), rtol=0, atol=0)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5"])
def test_quantized_weights_are_refused(tmp_path, model_type):
    """Read as they are stored, without their scales, they would be other weights."""
    config = shrink_config(transformers.AutoConfig.for_model(model_type))
    config.quantization_config = {"quant_method": "aqlm"}
    config.save_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    settings = settings_for(tmp_path)
    assert "quantized by 'aqlm'; known are" in why_config_not_trained(resolve_source(settings).config, trained=True)
    refused(RuntimeError, r"stored quantized \(aqlm\)", lambda: load_model(settings, lazy=True))
    with pytest.raises(RuntimeError, match="quantized by 'aqlm'; known are"):
        load_model(settings, lazy=True, packed_feed=open_packed)


def test_dropout_is_looked_for_without_weights(tmp_path):
    settings = settings_for(folder_of(tmp_path, "qwen3_moe"), lora=replace(ATTENTION_LORA, dropout=0.3))
    assert draws_random_numbers(discover_units(load_model(settings, lazy=True)))
    still = settings_for(tmp_path / "qwen3_moe", lora=ATTENTION_LORA)
    assert not draws_random_numbers(discover_units(load_model(still, lazy=True)))


def test_another_precision_is_rounded_as_transformers_does(build, tmp_path):
    folder = folder_of(tmp_path, "qwen2", dtype=torch.float32)
    compare(build, settings_for(folder, "bf16"))


def test_a_feed_holds_one_layer_at_a_time(tmp_path):
    for settings in (
        settings_for(folder_of(tmp_path, "mixtral", num_hidden_layers=4)),
        ModelSettings(preset="llama-1b", precision="bf16", seq_length=64, config_overrides=OVERRIDES),
    ):
        feed = feed_of(settings)
        groups = [sorted(group) for group in feed.groups()]
        layers = [[name.split(".")[2] for name in group if ".layers." in name] for group in groups]
        assert all(len(set(numbers)) <= 1 for numbers in layers)
        assert all(not numbers or len(numbers) == len(group) for numbers, group in zip(layers, groups, strict=True))
        given = [name for group in groups for name in group]
        assert len(given) == len(set(given)) and set(given) == feed.names


PEAK = """
import torch
from outcore.engine.stream.build import build_stream_engine
from outcore.formats import open_packed
from outcore.model import LoraSettings, ModelSettings, load_model
from tests.engine.stream.test_lazy import OVERRIDES, TINY

def resident_bytes(most: bool) -> int:
    name = "VmHWM" if most else "VmRSS"
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

torch.set_num_threads(1)
fields = OVERRIDES | {"vocab_size": 60_000, "hidden_size": 512, "tie_word_embeddings": False}
lora = LoraSettings(r=4, alpha=8)
for vocab_size in (300, 60_000):  # first what the code itself takes
    fields["vocab_size"] = vocab_size
    settings = ModelSettings(preset="llama-1b", precision="bf16", seq_length=64, config_overrides=fields, lora=lora)
    loaded = load_model(settings, lazy=True, packed_feed=open_packed)
    before = resident_bytes(most=False)
    engine = build_stream_engine(loaded, TINY, device="cpu", pinned_grant=False, trial=False)
    print("beyond", resident_bytes(most=True) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what Linux says of a process")
def test_the_peak_while_weights_are_made_is_their_homes_and_one_group(tmp_path):
    """The embedding waited in fp32 until the head was there: four times their homes for a moment."""
    script, log = tmp_path / "peak.py", tmp_path / "log"
    script.write_text(PEAK)
    assert run_script(script, [], os.environ, log) == 0, log.read_text()
    beyond = int(log.read_text().split()[-1])
    table_bytes = 60_000 * 512 * 2
    assert 3 * table_bytes < beyond < 5 * table_bytes  # two homes in bf16, one table in fp32


def test_a_checkpoint_that_is_not_whole_is_refused(build, tmp_path):
    folder = folder_of(tmp_path, "llama", shards=1)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    lost = {n: t for n, t in tensors.items() if "layers.1.mlp.up_proj" not in n}
    save_file(lost, path, metadata={"format": "pt"})
    refused(RuntimeError, "lacks 1 weights", lambda: build(load_model(settings_for(folder), lazy=True)))
    other = {n: t[:5].clone() if "layers.1.mlp.up_proj" in n else t for n, t in tensors.items()}
    save_file(other, path, metadata={"format": "pt"})
    refused(RuntimeError, "other shapes", lambda: build(load_model(settings_for(folder), lazy=True)))
    path.write_bytes(path.read_bytes()[:-100])
    refused(RuntimeError, "cannot be read", lambda: load_model(settings_for(folder), lazy=True))
    path.rename(folder / "other.safetensors")
    refused(RuntimeError, "as safetensors only", lambda: load_model(settings_for(folder), lazy=True))


@pytest.mark.parametrize("equal", [True, False])
def test_both_ends_of_a_tied_weight_in_a_checkpoint(build, tmp_path, equal):
    folder = folder_of(tmp_path, "llama", shards=1, tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() + (0 if equal else 1)
    save_file(tensors, path, metadata={"format": "pt"})
    if equal:
        compare(build, settings_for(folder))
    else:
        refused(RuntimeError, "different values", lambda: load_model(settings_for(folder), lazy=True))


def test_the_index_of_the_shards_is_followed(tmp_path):
    folder = folder_of(tmp_path, "llama")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(3)}, folder / "stray.safetensors")
    feed = feed_of(settings_for(folder))
    assert {name for group in feed.groups() for name in group} == feed.names
