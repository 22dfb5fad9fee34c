"""Settings, presets and sources: what is accepted, and what people read when it is not."""

import json
import re

import pytest

from outcore.model import PRESETS, LoraSettings, ModelSettings, max_positions, resolve_source
from outcore.model.facts import model_facts
from outcore.model.presets import check_preset_name, preset_config
from outcore.model.source import check_seq_length, hub_error, windows_path_hint
from tests.refused import refused

transformers = pytest.importorskip("transformers")


class FakeTokenizer:
    bos_token_id, eos_token_id, pad_token_id = 5, 6, 7

    def __init__(self, size: int = 300):
        self.size = size

    def __len__(self) -> int:
        return self.size


@pytest.mark.parametrize(("fields", "words"), [
    ({}, "got none"), ({"preset": "tiny", "config_file": "x.json"}, "preset 'tiny' and config_file 'x.json'"),
    ({"preset": "  "}, "preset is empty"), ({"preset": "lama-1b"}, "Did you mean 'llama-1b'"),
    ({"preset": "LLAMA-8B"}, "'llama-8b'"), ({"model_module": "my_model.py"}, "file.py:function"),
    ({"preset": "tiny", "precision": "bfloat16"}, "bf16, fp16, fp32"),
    ({"preset": "tiny", "attn_implementation": "spda"}, "Did you mean 'sdpa'"),
    ({"preset": "tiny", "seq_length": 1}, "at least 2 tokens"),
    ({"preset": "tiny", "seq_length": 4096.0}, "whole number"),
    ({"preset": "tiny", "vocab_size": 1}, "at least 2 entries"), ({"preset": "tiny", "seed": -1}, "seed is -1"),
])  # fmt: skip
def test_bad_settings_say_what_to_do(fields, words):
    refused(ValueError, re.escape(words), lambda: ModelSettings(**fields))


@pytest.mark.parametrize(("fields", "words"), [
    ({"r": 0}, "at least 1"), ({"r": 8.5}, "whole number"), ({"alpha": 0}, "above 0"), ({"dropout": 1.0}, "[0, 1)"),
    ({"bias": "lora"}, "Did you mean 'lora_only'"), ({"target_modules": ()}, "is empty"),
    ({"target_modules": " , "}, "is empty"),
])  # fmt: skip
def test_bad_lora_settings(fields, words):
    refused(ValueError, re.escape(words), lambda: LoraSettings(**fields))


@pytest.mark.parametrize("name", list(PRESETS))
def test_preset_sizes_are_those_of_the_published_models(name):
    preset = PRESETS[name]
    facts = model_facts(preset_config(name))
    assert facts.total_params == preset.num_parameters
    assert facts.is_encoder_decoder == preset.is_encoder_decoder
    assert facts.is_moe == ("experts" in preset.summary)


def test_tiny_presets_take_the_tokenizers_vocabulary_and_real_ones_only_grow():
    assert preset_config("tiny", 1234).vocab_size == 1234
    assert preset_config("gpt2", 1234).vocab_size == 50257
    assert preset_config("gpt2", 50258).vocab_size == 50304


def test_special_tokens_of_the_tokenizer_reach_the_config():
    config = resolve_source(ModelSettings(preset="tiny", seq_length=64), FakeTokenizer()).config
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id) == (300, 5, 6, None)
    config = resolve_source(ModelSettings(preset="tiny-t5", seq_length=64), FakeTokenizer()).config
    assert (config.pad_token_id, config.decoder_start_token_id) == (7, 7)


def test_sequence_longer_than_the_model():
    with pytest.raises(ValueError, match=r"knows 1024 positions.*--seq_length 1024"):
        resolve_source(ModelSettings(preset="gpt2", seq_length=2048))
    assert max_positions(preset_config("t5-small")) is None
    check_seq_length(preset_config("t5-small"), 100_000)
    assert resolve_source(ModelSettings(preset="gpt2", seq_length=1024)).path is None


def test_overrides_are_checked_and_layers_can_be_cut():
    source = resolve_source(ModelSettings(preset="tiny", seq_length=64, config_overrides={"num_hidden_layers": 2}))
    assert source.config.num_hidden_layers == 2
    with pytest.raises(ValueError, match="Did you mean 'hidden_size'"):
        resolve_source(ModelSettings(preset="tiny", config_overrides={"hiden_size": 2}))
    qwen = resolve_source(ModelSettings(preset="qwen3-4b", config_overrides={"num_hidden_layers": 3})).config
    assert len(qwen.layer_types) == 3


def write_config(folder, **fields):
    path = folder / "shape.json"
    path.write_text(json.dumps(fields))
    return str(path)


def test_a_config_file_makes_a_model_and_grows_to_the_tokenizer(tmp_path):
    path = write_config(tmp_path, model_type="llama", hidden_size=64, num_hidden_layers=1, vocab_size=100)
    source = resolve_source(ModelSettings(config_file=path, seq_length=64), FakeTokenizer(300))
    assert source.config.vocab_size == 300 and "grown from 100" in source.notes[0]
    yaml_path = tmp_path / "shape.yaml"
    yaml_path.write_text("model_type: gpt2\nn_layer: 3\n")
    assert resolve_source(ModelSettings(config_file=str(yaml_path), seq_length=64)).config.num_hidden_layers == 3


@pytest.mark.parametrize(("text", "words"), [
    ("{broken", "cannot be read"), ("[1, 2]", "must be a mapping with a model_type"),
    ('{"hidden_size": 4}', "must be a mapping with a model_type"), ('{"model_type": "lama"}', "Did you mean 'llama'"),
])  # fmt: skip
def test_bad_config_files(tmp_path, text, words):
    path = tmp_path / "shape.json"
    path.write_text(text)
    refused(ValueError, re.escape(words), lambda: resolve_source(ModelSettings(config_file=str(path))))


def test_bad_yaml_and_a_missing_config_file(tmp_path):
    path = tmp_path / "shape.yaml"
    path.write_text("a: [1, 2")
    refused(ValueError, "cannot be read", lambda: resolve_source(ModelSettings(config_file=str(path))))
    write_config(tmp_path, model_type="llama")
    with pytest.raises(ValueError, match=r"Did you mean 'shape\.json'"):
        resolve_source(ModelSettings(config_file=str(tmp_path / "shap.json")))
    refused(ValueError, r"/mnt/c/shape\.json", lambda: resolve_source(ModelSettings(config_file="C:\\shape.json")))


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        resolve_source(ModelSettings(model_name_or_path=str(tmp_path)))
    inner = tmp_path / "checkpoint"
    inner.mkdir()
    (inner / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="checkpoint' does: use that"):
        resolve_source(ModelSettings(model_name_or_path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"no \*\.safetensors weights"):
        resolve_source(ModelSettings(model_name_or_path=str(inner)))
    (inner / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="a pickle, which is not read"):
        resolve_source(ModelSettings(model_name_or_path=str(inner)))
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(ValueError, "LoRA adapter only", lambda: resolve_source(ModelSettings(model_name_or_path=str(tmp_path))))
    with pytest.raises(ValueError, match="is a file"):
        resolve_source(ModelSettings(model_name_or_path=str(inner / "config.json")))
    with pytest.raises(ValueError, match="Did you mean 'checkpoint'"):
        resolve_source(ModelSettings(model_name_or_path=str(tmp_path / "chekpoint")))
    with pytest.raises(ValueError, match="nor is there a folder"):
        resolve_source(ModelSettings(model_name_or_path="/no/such/place/model"))
    (inner / "model.safetensors").write_bytes(b"")
    (inner / "config.json").write_text("{")
    refused(ValueError, "cannot be read", lambda: resolve_source(ModelSettings(model_name_or_path=str(inner))))
    (inner / "config.json").write_text('{"model_type": "brandnew"}')
    refused(ValueError, "does not know", lambda: resolve_source(ModelSettings(model_name_or_path=str(inner))))


@pytest.mark.parametrize(("spelling", "words"), [
    ("C:\\models\\llama", "/mnt/c/models/llama"), ("d:/models/llama", "/mnt/d/models/llama"),
    ("\\\\wsl.localhost\\Ubuntu\\home\\me\\llama", "/home/me/llama"), ("\\\\wsl$\\Ubuntu\\home\\me", "/home/me"),
    ("\\\\server\\share\\llama", "mount that share"), ("models\\llama", "models/llama"),
])  # fmt: skip
def test_windows_spellings_are_explained(spelling, words):
    assert words in (windows_path_hint(spelling) or "")
    refused(ValueError, re.escape(words), lambda: resolve_source(ModelSettings(model_name_or_path=spelling)))
    assert windows_path_hint("owner/name") is None


def raised(kind: str, text: str, cause: str | None = None) -> Exception:
    error = OSError(text)
    error.__cause__ = type(cause, (Exception,), {})("x") if cause else None
    return error if kind == "OSError" else type(kind, (ValueError,), {})(text)


@pytest.mark.parametrize(("error", "words"), [
    (raised("OSError", "We couldn't connect to the hub", "LocalEntryNotFoundError"), "hub cannot be reached"),
    (raised("OSError", "no", "OfflineModeIsEnabled"), "--preset tiny"),
    (raised("OSError", "x is not a valid model identifier", "RepositoryNotFoundError"), "The hub has no model"),
    (raised("OSError", "403", "GatedRepoError"), "accept their terms"),
    (raised("ValueError", "set trust_remote_code=True to run"), "--trust_remote_code true"),
    (raised("ValueError", "does not recognize model type foo"), "newer transformers"),
    (raised("OSError", "disk on fire"), "disk on fire"),
])  # fmt: skip
def test_hub_failures_in_words(error, words):
    assert words in str(hub_error("owner/name", error))


def test_an_unreachable_hub_names_local_ways(monkeypatch):
    def fail(*args, **kwargs):
        raise raised("OSError", "We couldn't connect to the hub", "ConnectionError")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    asked = ModelSettings(model_name_or_path="owner/name")
    refused(RuntimeError, r"use the folder of a model on this machine \(to train, also", lambda: resolve_source(asked))


def test_there_is_no_source_for_a_module():
    refused(ValueError, "builds its own model", lambda: resolve_source(ModelSettings(model_module="a.py:build")))
    assert check_preset_name("tiny").vocab_from_tokenizer
