"""Loading by a plain argument: `quantization_config=OutcoreConfig(...)` in programs that load a model by its name."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import outcore.hf
from outcore.formats import PackedSpec, packed_format
from outcore.hf import OutcoreConfig, OutcoreQuantizer
from tests.hf.callers import TRAINERS, assert_same, tiny, tokenizer, trained, with_lora

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny("qwen3").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def is_streamed(model: Any) -> bool:
    return any(type(module).forward.__module__.startswith("outcore.hf") for module in model.modules())


@pytest.mark.more(after=1)
@pytest.mark.parametrize("which", ["sft", "dpo"])
@pytest.mark.parametrize("lora", [False, True])
def test_trl_given_a_path_streams_and_leaves_the_same_bits(
    which: str, lora: bool, folder: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig

    def run(out: Path, **kwargs: Any) -> Any:
        more: dict[str, Any] = {"model_init_kwargs": {"dtype": "float32", **kwargs}}
        trainer = TRAINERS[which](str(folder), out, 2, peft=LoraConfig(task_type="CAUSAL_LM") if lora else None, **more)
        assert is_streamed(trainer.model) == bool(kwargs)
        torch.manual_seed(7)
        trainer.train()
        trainer.save_model(str(out / "saved"))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        name = "adapter_model.safetensors" if lora else "model.safetensors"
        return losses, load_file(out / "saved" / name)

    (losses, weights) = run(tmp_path / "plain")
    (losses_too, weights_too) = run(tmp_path / "streamed", quantization_config=OutcoreConfig(vram_gib=6.5))
    assert losses == losses_too and list(weights) == list(weights_too)
    assert all(torch.equal(tensor, weights_too[name]) for name, tensor in weights.items())


def test_what_a_streamed_model_saves_is_a_plain_model(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=OutcoreConfig())
    assert is_streamed(model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == (folder / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert not is_streamed(again)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_wrong_arguments_are_refused_before_anything_is_loaded(folder: Path) -> None:
    with pytest.raises(ValueError, match="quantize must be nf4 or int8"):
        OutcoreConfig(base="nf5")
    with pytest.raises(ValueError, match="not vram"):
        OutcoreConfig(vram=8)
    with pytest.raises(ValueError, match="leave device_map out"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=OutcoreConfig(), device_map={"": "cpu"})


def expanded(model: Any) -> Any:
    """The same model with its layers' matrices as NF4 gives them back."""
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim == 2 and ".layers." in name and "lora_" not in name
        if matrix and parameter.shape[-1] % 64 == 0:
            spec = PackedSpec(packed_format("nf4"), tuple(parameter.shape))
            parameter.data = spec.unpack(spec.pack(parameter.data), parameter.dtype)
    return model


@pytest.mark.parametrize("which", ["sft", "dpo"])
def test_a_packed_base_trains_as_the_resident_expanded_one(which: str, tmp_path: Path) -> None:
    losses, weights = trained(
        which, "llama", tmp_path / "packed", lora=True, prepare=lambda model: outcore.hf.stream(model, quantize="nf4")
    )
    plain = trained(which, "llama", tmp_path / "plain", lora=True, prepare=expanded)
    packed = [name for name in plain[1] if name not in weights]
    assert len(packed) > 5 and all("layers" in name for name in packed)
    assert_same((plain[0], {name: tensor for name, tensor in plain[1].items() if name in weights}), (losses, weights))


def test_a_packed_base_says_what_it_cannot_do(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=OutcoreConfig(base="nf4"))
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path)
    assert not any(p.requires_grad for p in model.parameters())
    model = with_lora(model, "qwen3")
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved and all("lora_" in name for name in saved)
    for do in (
        model.merge_and_unload, lambda: copy.deepcopy(model), lambda: torch.save(model, tmp_path / "model.pt"),
        model.half, lambda: model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.sum(),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="frozen weights are packed in nf4"):
            do()
    with pytest.raises(RuntimeError, match="frozen weights are packed in nf4"):
        model.load_state_dict({name: torch.zeros(p.shape) for name, p in model.named_parameters()}, strict=False)


def test_a_base_is_packed_as_it_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix of the layers is ever held expanded, and the bits are those of packing the loaded model."""
    config = OutcoreConfig(base="nf4")
    seen: list[int] = []
    own = PackedSpec.pack
    monkeypatch.setattr(PackedSpec, "pack", lambda spec, value: (seen.append(_layers_bytes()), own(spec, value))[1])
    models: list[Any] = []
    before = OutcoreQuantizer._process_model_before_weight_loading

    def watch(self: Any, model: Any, **kwargs: Any) -> Any:
        models.append(model)
        return before(self, model, **kwargs)

    def _layers_bytes() -> int:
        (model,) = models
        matrices = [m.weight for layer in model.model.layers for m in layer.modules() if isinstance(m, nn.Linear)]
        fit = [p for p in matrices if p.shape[-1] % 64 == 0]
        return sum(p.nbytes for p in fit if type(p) is nn.Parameter and not p.is_meta)

    monkeypatch.setattr(OutcoreQuantizer, "_process_model_before_weight_loading", watch)
    by_name = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert len(seen) > 5 and set(seen) == {0}
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    at_once = outcore.hf.stream(AutoModelForCausalLM.from_pretrained(folder), quantize="nf4")
    ids = torch.arange(24).view(2, 12) + 4
    assert torch.equal(by_name(input_ids=ids).logits, at_once(input_ids=ids).logits)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(by_name(input_ids=ids).logits, plain(input_ids=ids).logits)
