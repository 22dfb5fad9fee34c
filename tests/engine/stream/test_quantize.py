"""A packed frozen base under adapters: training equals, to the bit, that over the same base expanded and resident."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from outcore.data import load_tokenizer
from outcore.flow.parts import run_shape
from outcore.formats import open_packed
from outcore.formats.gguf_files import write_gguf
from outcore.model import LoraSettings, ModelSettings, load_model
from tests.engine.inside import parts_of
from tests.engine.stream import test_lazy
from tests.engine.stream.training import fixtures, homes_of, same
from tests.flow.models import needs, padded_batch, plain_batch
from tests.formats.test_gguf import folder_of, values_of
from tests.infer.models import MIXTURE as MIXED
from tests.infer.models import save_tiny_model
from tests.infer.parts.test_experts import pack_experts

(built,), of_loaded = fixtures, test_lazy.build
FIELDS = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip
MIXTURE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "vocab_size": 300}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def build(of_loaded):
    def make(settings: ModelSettings, *, lazy: bool = True, **changes):
        return of_loaded(load_model(settings, lazy=lazy), **changes)

    return make


def settings_for(quantize: str | None, preset: str = "llama-1b", precision: str = "bf16") -> ModelSettings:
    fields, lora = FIELDS, LoraSettings(r=4, alpha=8)
    if preset == "tiny-moe":
        fields, lora = MIXTURE, LoraSettings(r=4, target_modules=("q_proj", "o_proj"))
    more: dict = {"config_overrides": fields, "lora": lora, "quantize": quantize}
    return ModelSettings(preset=preset, precision=precision, seq_length=64, **more)


def packed_names(engine) -> set[str]:
    return {slot.name for unit in parts_of(engine).units.all for slot in unit.layout.packed_slots}


def trained(engine, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    batches = [[plain_batch(2, 12, seed=step), padded_batch(2, 16, seed=50 + step)] for step in range(steps)]
    losses = [engine.train_step(step, 1e-2).loss for step in batches]
    return losses, {name: value for name, value in homes_of(engine).items() if "lora_" in name}


@pytest.mark.more(after=2)
@pytest.mark.parametrize(("quantize", "preset", "precision", "changes"), [
    ("nf4", "llama-1b", "bf16", {}), ("nf4", "llama-1b", "bf16", {"weight_ram_bytes": 60_000}),
    ("nf4", "llama-1b", "bf16", {"weight_ram_bytes": 0, "num_layer_buffers": 1}),
    ("int8", "llama-1b", "fp32", {"activations": "ram"}), ("nf4", "tiny-moe", "bf16", {}),
    ("nf4", "llama-1b", "bf16", {"resident_bytes": 1 << 40}),
    ("nf4", "llama-1b", "fp32", {"tiling": "on", "tile_bytes": 1 << 20}),
    ("nf4", "tiny-moe", "bf16", {"tiling": "on", "tile_bytes": 1 << 20, "weight_ram_bytes": 60_000}),
])  # fmt: skip
def test_training_equals_that_over_the_expanded_base(build, quantize, preset, precision, changes):
    engine = build(settings_for(quantize, preset, precision), **changes)
    resident = build(settings_for(None, preset, precision), lazy=False)
    homes = parts_of(engine).homes
    packed = packed_names(engine)
    assert packed and all("lora_" not in name and "layers." in name for name in packed)
    plain = {name for name in homes.weights.names() if name not in packed and "lora_" not in name}
    assert all(torch.equal(homes.weights.read(name), parts_of(resident).homes.weights.read(name)) for name in plain)
    changed = 0
    for name in packed:
        value = homes.weights.read(name)
        changed += not torch.equal(value, parts_of(resident).homes.weights.read(name))
        parts_of(resident).homes.weights.write(name, value)
    assert changed == len(packed)
    found = trained(engine)
    assert same(found, trained(resident))
    adapters = found[1]
    assert any("lora_B" in name and value.abs().max() > 0 for name, value in adapters.items())


def test_homes_hold_packed_bytes_and_the_way_up_carries_them(build):
    engine, resident = build(settings_for("nf4")), build(settings_for(None))
    layers = parts_of(engine).units.layer_units
    whole = [unit.layout.size_bytes for unit in layers]
    assert all(unit.layout.home_bytes < 0.45 * size for unit, size in zip(layers, whole, strict=True))
    saved = parts_of(resident).homes.weights.ram_bytes - parts_of(engine).homes.weights.ram_bytes
    assert saved == sum(size - unit.layout.home_bytes for unit, size in zip(layers, whole, strict=True))
    for unit in layers:
        kinds = {slot.name.split(".")[-2] for slot in unit.layout.slots if slot.packed is None}
        assert kinds == {"lora_A", "lora_B", "input_layernorm", "post_attention_layernorm"} or "lora_A" in str(kinds)


def test_what_does_not_divide_into_blocks_is_told(build):
    said = build(settings_for("int8")).describe()  # down_proj has rows of 192
    assert "packed: 18 of 21 matrices of layers as int8; 3 stay as they are" in said
    assert "packed: 21 of 21 matrices of layers as nf4\n" in build(settings_for("nf4")).describe()
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
    odd = replace(settings_for("int8"), config_overrides=FIELDS | heads | {"hidden_size": 96, "intermediate_size": 160})
    with pytest.raises(ValueError, match="no matrix of this model divides into its blocks"):
        build(odd)


def test_expanded_weights_are_the_same_from_ram_and_from_the_drive(build, tmp_path):
    first = build(settings_for("nf4"))
    second = build(settings_for("nf4"), weight_ram_bytes=0)
    for name in packed_names(first):
        assert torch.equal(parts_of(first).homes.weights.read(name), parts_of(second).homes.weights.read(name))
    assert parts_of(second).homes.weights.nvme_bytes > 0


def fp8(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale of each block of 128 x 128) of a matrix."""
    rows, columns = (-(-size // 128) for size in value.shape)
    scale = torch.rand(rows, columns) * 0.01 + 0.001
    wide = scale.repeat_interleave(128, 0)[: value.shape[0]].repeat_interleave(128, 1)[:, : value.shape[1]]
    codes = (value / wide).clamp(-400, 400).to(torch.float8_e4m3fn)
    return codes, scale


def published(tmp_path, preset: str, *, mixture: bool):
    """(folder of an FP8 checkpoint, folder of the same weights in 16 bits)."""
    model = load_model(replace(settings_for(None, preset), lora=None)).model
    folders = tmp_path / "fp8", tmp_path / "plain"
    for folder in folders:
        model.save_pretrained(folder)
    stored = load_file(folders[1] / "model.safetensors")
    packed, plain = {}, {}
    for name, value in stored.items():
        if value.ndim != 2 or "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight"):
            packed[name] = plain[name] = value
            continue
        codes, scale = fp8(value.float())
        packed |= {name: codes, name.removesuffix("weight") + "weight_scale_inv": scale}
        wide = scale.repeat_interleave(128, 0)[: value.shape[0]].repeat_interleave(128, 1)[:, : value.shape[1]]
        plain[name] = (codes.float() * wide).bfloat16()
    assert any("experts" in name for name in packed) == mixture
    for folder, tensors in zip(folders, (packed, plain), strict=True):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folders[0] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folders[0] / "config.json").write_text(json.dumps(config))
    return folders


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("preset", "mixture"), [("llama-1b", False), ("tiny-moe", True)])
def test_a_published_fp8_checkpoint_trains_as_its_16_bit_values_do(of_loaded, tmp_path, engines, preset, mixture):
    packed_folder, plain_folder = published(tmp_path, preset, mixture=mixture)
    results = []
    for folder in (packed_folder, plain_folder):
        settings = ModelSettings(
            model_name_or_path=str(folder), precision="bf16", seq_length=64, lora=settings_for(None, preset).lora
        )
        of_loaded(load_model(settings, lazy=True, packed_feed=open_packed))
        results.append(trained(engines[-1]))
    packed, plain = engines
    assert all("layers." in name for name in packed_names(packed)) and not packed_names(plain)
    kinds = {name.split(".")[-2] for name in packed_names(packed)} | {
        name.split(".")[-1] for name in packed_names(packed)
    }
    assert ({"q_proj", "o_proj"} <= kinds and ({"gate_up_proj", "down_proj"} <= kinds) == mixture) or not mixture
    for name in parts_of(plain).homes.weights.names():
        if "lora_" not in name:
            assert torch.equal(parts_of(packed).homes.weights.read(name), parts_of(plain).homes.weights.read(name)), (
                name
            )
    assert results[0][0] == results[1][0]
    assert getattr(packed.loaded.config, "quantization_config", None) is None
    assert any("packed as published (fp8)" in note for note in packed.loaded.notes)


@pytest.mark.more
@pytest.mark.parametrize("model", [pytest.param("gpt_oss", marks=needs("gpt_oss"))])
def test_packed_experts_train_in_tiles_as_they_do_whole(of_loaded, tmp_path, engines, model):
    """Experts as published in MXFP4, the other way round than their parameters: one by one, in runs of their rows."""
    save_tiny_model(tmp_path, family=model, **MIXED)
    pack_experts(tmp_path, "mxfp4")
    lora = LoraSettings(r=4, target_modules=("q_proj", "o_proj"))
    settings = ModelSettings(model_name_or_path=str(tmp_path), precision="fp32", seq_length=64, lora=lora)
    found = []
    for changes in ({}, {"tiling": "on", "tile_bytes": 40_000}):
        of_loaded(load_model(settings, lazy=True, packed_feed=open_packed), **changes)
        found.append(trained(engines[-1]))
    tiled = [matrix for unit in parts_of(engines[1]).tile_plan.tiled for matrix in unit.all_matrices]
    assert any(matrix.packed is not None and matrix.num_tiles > 2 for matrix in tiled)
    assert packed_names(engines[1]) == {matrix.slot.name for matrix in tiled if matrix.packed is not None}
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    for name, value in found[1][1].items():
        assert (value - found[0][1][name]).norm() <= 1e-3 * found[0][1][name].norm(), name


@pytest.mark.more
def test_a_gguf_file_trains_as_its_16_bit_values_do(of_loaded, tmp_path, engines):
    """Its blocks stay packed; tokenizer and configuration come from the file too."""
    pytest.importorskip("gguf")
    folder = folder_of(tmp_path, vocab_size=300)
    file = write_gguf(folder, tmp_path / "model.gguf", "q4_k")
    values, _ = values_of(file, folder)
    of_file, of_folder = (load_tokenizer(str(name)).get_vocab() for name in (file, folder))
    assert of_folder.items() <= of_file.items()  # transformers adds an end token of its own
    save_file({name: v.bfloat16() for name, v in values.items()}, folder / "model.safetensors", {"format": "pt"})
    results = []
    for name in (file, folder):
        settings = ModelSettings(
            model_name_or_path=str(name), precision="bf16", seq_length=32, lora=settings_for(None).lora
        )
        assert bool(run_shape(settings, None).quantize) == (name == file)
        of_loaded(load_model(settings, lazy=True, packed_feed=open_packed))
        assert bool(packed_names(engines[-1])) == (name == file)
        results.append(trained(engines[-1]))
    assert same(*results)
