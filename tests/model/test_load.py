"""Loading: initial weights by seed and name, trained weights, LoRA, exports, sampling."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from outcore.checkpoint.export import export_model
from outcore.model import LoraSettings, ModelSettings, generate_tokens, load_model, resolve_source
from outcore.model.facts import (
    model_class_of,
    model_facts,
    named_checkpoint_parameters,
    resolve_attention,
)
from outcore.model.load import enable_activation_checkpointing
from outcore.model.trial.shrink import shrink_config
from outcore.model.weights.initialise import InitPlan, init_regions, initialise_weights, meta_skeleton
from outcore.model.weights.zero3 import partition_while_loading
from tests.model.cases import batch_of, tiny_config, tiny_settings
from tests.refused import refused

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# Initial weights -----------------------------------------------------------------------------------------------------


def test_initial_weights_depend_on_seed_and_name_alone():
    first = weights(load_model(tiny_settings()).model)
    torch.manual_seed(99)
    again = weights(load_model(tiny_settings()).model)
    other = weights(load_model(tiny_settings(seed=1)).model)
    assert all(torch.equal(first[name], again[name]) for name in first)
    q = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(first[q], other[q])
    deeper = weights(
        load_model(
            tiny_settings(config_overrides={"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96})
        ).model
    )
    assert torch.equal(deeper[q], first[q]), "a layer's weights must not depend on what else the model has"


def test_16_bit_weights_are_the_rounded_fp32_ones():
    exact, rounded = (
        weights(load_model(tiny_settings()).model),
        weights(load_model(tiny_settings(precision="bf16")).model),
    )
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "t5", "mixtral", "gemma3_text", "gpt_neox", "phi"])
def test_initial_weights_follow_the_models_own_distribution(model_type):
    config = tiny_config(model_type)
    model_class = model_class_of(config)
    torch.manual_seed(0)
    own, ours = model_class(config), model_class(config)
    assert initialise_weights(ours, meta_skeleton(model_class, config), seed=3) == []
    reference = weights(own)
    for name, value in weights(ours).items():
        std, expected = float(value.std()), float(reference[name].std())
        assert torch.isfinite(value).all()
        if expected == 0:
            assert torch.equal(value, reference[name]), name
        else:
            assert math.isclose(std, expected, rel_tol=0.35), (name, std, expected)
            assert not torch.equal(value, reference[name])


def test_streamed_initial_weights_equal_those_of_the_model():
    model = load_model(tiny_settings("tiny-moe")).model
    skeleton = meta_skeleton(type(model), model.config)
    assert all(p.is_meta for p in skeleton.parameters())
    streamed: dict[str, torch.Tensor] = {}
    largest = 0
    for region in InitPlan(skeleton).values(42):
        streamed.update(region)
        largest = max(largest, sum(value.numel() for value in region.values()))
    assert all(p.is_meta for p in skeleton.parameters()), "the skeleton must be left as it was"
    for name, parameter in model.named_parameters():
        assert torch.equal(streamed[name], parameter), name
    assert largest < 0.6 * model_facts(model).total_params
    assert len(init_regions(skeleton)) >= 3


def test_parameters_without_initialiser_keep_their_constructors_values():
    class Plain(nn.Module):
        def __init__(self, config=None):
            super().__init__()
            self.scale = nn.Parameter(torch.full((3,), 7.0))
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

    model = Plain()
    assert initialise_weights(model, meta_skeleton(Plain, None), seed=0) == ["scale"]
    assert model.scale.tolist() == [7.0, 7.0, 7.0]
    refused(RuntimeError, "lacks", lambda: initialise_weights(nn.Linear(2, 2), meta_skeleton(Plain, None), seed=0))


# Trained weights -----------------------------------------------------------------------------------------------------


def test_a_saved_model_comes_back(tmp_path):
    loaded = load_model(tiny_settings())
    folder = tmp_path / "my model"
    loaded.model.save_pretrained(folder)
    again = load_model(ModelSettings(model_name_or_path=str(folder), precision="fp32", seq_length=32))
    assert "folder" in again.words and again.facts == loaded.facts
    first, second = weights(loaded.model), weights(again.model)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ValueError, match="do not belong together"):
        load_model(ModelSettings(model_name_or_path=str(folder), vocab_size=129, seq_length=32))


def test_an_incomplete_checkpoint_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    loaded = load_model(tiny_settings())
    loaded.model.save_pretrained(tmp_path)
    path = str(tmp_path / "model.safetensors")
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="lacks 1 weights"):
        load_model(ModelSettings(model_name_or_path=str(tmp_path), seq_length=32))
    Path(path).write_bytes(b"\0" * 100)
    with pytest.raises(RuntimeError, match="damaged or cut short"):
        load_model(ModelSettings(model_name_or_path=str(tmp_path), seq_length=32))


def test_attention_is_chosen_or_refused_in_words():
    gemma = shrink_config(transformers.AutoConfig.for_model("gemma2"))
    assert resolve_attention(gemma, "auto")[0] == "eager"
    assert resolve_attention(gemma, "eager") == ("eager", ())
    assert resolve_attention(transformers.AutoConfig.for_model("llama"), "auto") == ("sdpa", ())
    with pytest.raises(ValueError, match=r"caps the logits of attention \(at 50\).*--attn_implementation auto"):
        resolve_attention(gemma, "sdpa")
    with pytest.raises(ValueError, match=r"flash_attention_2.*--attn_implementation auto"):
        load_model(tiny_settings(attn_implementation="flash_attention_2"))


def test_zero3_configuration_of_another_stage_is_refused():
    with pytest.raises(ValueError, match="stage 3 only"), partition_while_loading({"zero_optimization": {"stage": 2}}):
        pass


def test_two_parameters_of_one_name_are_an_error():
    clash = nn.Module()
    clash.module, clash.x = nn.Module(), nn.Parameter(torch.zeros(1))
    clash.module.x = nn.Parameter(torch.zeros(1))
    refused(RuntimeError, "Two parameters", lambda: named_checkpoint_parameters(clash))


def test_activation_checkpointing_needs_support():
    refused(ValueError, "no activation checkpointing", lambda: enable_activation_checkpointing(nn.Linear(1, 1)))
    loaded = load_model(tiny_settings(gradient_checkpointing=True))
    model = loaded.model  # renamed in the course of transformers 5
    checkpoints = getattr(model, "is_activation_checkpointing", None) or model.is_gradient_checkpointing
    assert checkpoints and not loaded.config.use_cache


def test_a_model_without_activation_checkpointing_is_streamed_all_the_same(tmp_path):
    """CTRL has none; loaded lazily, for the engine that recomputes layers by itself, it needs none."""
    (tmp_path / "ctrl.json").write_text(json.dumps(shrink_config(transformers.AutoConfig.for_model("ctrl")).to_dict()))
    settings = ModelSettings(
        config_file=str(tmp_path / "ctrl.json"), precision="fp32", seq_length=32, gradient_checkpointing=True
    )
    assert load_model(settings, lazy=True).feed is not None
    refused(ValueError, "--gradient_checkpointing false", lambda: load_model(settings))


# LoRA ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["tiny", "gpt2"])
def test_lora_trains_adapters_only_and_merges(preset, tmp_path):
    small = {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 128, "n_positions": 64}
    fields = {"config_overrides": small} if preset == "gpt2" else {}
    base = load_model(tiny_settings(preset, **fields))
    loaded = load_model(tiny_settings(preset, lora=LoraSettings(r=4, alpha=8), gradient_checkpointing=True, **fields))
    assert loaded.facts.trainable_params < loaded.facts.total_params / 4
    assert all("lora_" in name for name, p in loaded.model.named_parameters() if p.requires_grad)
    loss, batch = loaded.token_loss(num_chunks=2), batch_of()
    base.model.eval()
    loaded.model.eval()
    torch.testing.assert_close(loss(loaded.model, batch).loss_sum, base.token_loss()(base.model, batch).loss_sum)
    before = {name: value for name, value in weights(loaded.model).items() if "lora_" not in name}
    loaded.model.train()
    optimizer = torch.optim.SGD([p for p in loaded.model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        loss(loaded.model, batch).objective(30).backward()
        optimizer.step()
    assert all(torch.equal(value, dict(loaded.model.named_parameters())[name]) for name, value in before.items())
    loaded.model.eval()
    with torch.no_grad():
        wanted = loaded.model(input_ids=batch["input_ids"]).logits
    export_model(tmp_path / "merged", loaded.model, torch.Tensor.detach)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert {name for name, _ in merged.named_parameters()} == {name for name, _ in base.model.named_parameters()}
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=batch["input_ids"]).logits, wanted, rtol=1e-4, atol=1e-5)
    export_model(tmp_path / "adapter", loaded.model, torch.Tensor.detach, adapter_only=True)
    from peft import PeftModel

    plain = load_model(tiny_settings(preset, **fields)).model
    revived = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        torch.testing.assert_close(revived(input_ids=batch["input_ids"]).logits, wanted, rtol=1e-5, atol=1e-6)


def test_adapters_start_the_same_and_keep_names():
    settings = tiny_settings(lora=LoraSettings(r=4, target_modules=("q_proj",)))
    first, again = load_model(settings).model, load_model(settings).model
    named = named_checkpoint_parameters(first)
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in named
    for name, parameter in named_checkpoint_parameters(again).items():
        assert torch.equal(named[name], parameter)
    a = [p for name, p in named.items() if "lora_A" in name]
    assert not torch.equal(a[0], a[1])


def test_lora_on_modules_that_are_not_there():
    with pytest.raises(ValueError, match="Did you mean 'q_proj'"):
        load_model(tiny_settings(lora=LoraSettings(target_modules=("query_proj",))))


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe", "tiny-t5"])
def test_an_export_is_what_the_library_loads(preset, tmp_path):
    lora = LoraSettings(r=2) if preset == "tiny" else None
    loaded = load_model(tiny_settings(preset, lora=lora, precision="bf16"))
    export_model(tmp_path, loaded.model, torch.Tensor.detach)
    exported = load_file(tmp_path / "model.safetensors")
    assert all(value.dtype == torch.bfloat16 for value in exported.values())
    if preset == "tiny-moe":
        assert "model.layers.0.mlp.experts.3.gate_proj.weight" in exported, "experts apart, as they are published"
    auto = transformers.AutoModelForSeq2SeqLM if preset == "tiny-t5" else transformers.AutoModelForCausalLM
    revived, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert revived.config.use_cache and next(revived.parameters()).dtype == torch.bfloat16
    batch = {"input_ids": batch_of()["input_ids"]}
    if preset == "tiny-t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    with torch.no_grad():
        assert torch.equal(revived(**batch).logits, loaded.model.eval()(**batch).logits)


def test_exports_keep_persistent_buffers_and_modules_without_config(tmp_path):
    class WithBuffer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.register_buffer("table", torch.arange(3.0))
            self.register_buffer("scratch", torch.zeros(9), persistent=False)

    export_model(tmp_path / "out", WithBuffer(), torch.Tensor.detach)
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "table"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "outcore-checksums.json"}


# Sampling ------------------------------------------------------------------------------------------------------------


def test_greedy_sampling_equals_the_librarys():
    loaded = load_model(tiny_settings())
    ids = batch_of(rows=1)["input_ids"]
    ours = generate_tokens(loaded.model, ids, 8)
    loaded.model.eval()
    theirs = loaded.model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert ours.tolist() == theirs[0, 16:].tolist()
    loaded.model.train()
    assert generate_tokens(loaded.loss_module(), ids, 8).tolist() == ours.tolist()
    assert loaded.model.training
    stopped = generate_tokens(loaded.model, ids, 8, end_tokens={int(ours[3]), -1})
    assert stopped.tolist() == ours[: ours.tolist().index(int(ours[3])) + 1].tolist()


def test_sampling_leaves_the_stream_alone_and_refuses_nothing_to_go_on_from():
    loaded = load_model(tiny_settings())
    ids = batch_of(rows=1)["input_ids"]
    before = torch.get_rng_state()
    assert generate_tokens(loaded.model, ids, 2).shape == (2,)
    assert torch.equal(before, torch.get_rng_state())
    refused(ValueError, "at least one token", lambda: generate_tokens(loaded.model, ids[:, :0], 2))
    refused(ValueError, "at least 1", lambda: generate_tokens(loaded.model, ids, 0))


def test_presets_are_offered_as_shapes_to_train_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model that answers needs weights, so its near names are those of folders and runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RuntimeError, match="Training and plans have a preset 'tiny'") as told:
        resolve_source(ModelSettings(model_name_or_path="tinny"))
    assert "Did you mean" not in str(told.value)
    (tmp_path / "tinnie").mkdir()
    with pytest.raises(RuntimeError, match="Did you mean 'tinnie'") as told:
        resolve_source(ModelSettings(model_name_or_path="tinny"))
    assert "preset 'tiny'" not in str(told.value)
