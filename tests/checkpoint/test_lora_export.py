"""Exports with adapters merged in compute what the adapted model computed, whatever else the base model holds; and what
adapters on the embedding and the head learn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from outcore.checkpoint.export import export_model
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.engine import StreamEngine
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import StreamUnsupported
from outcore.model import LoadedModel, LoraSettings
from outcore.model.adapters import apply_lora
from outcore.model.facts import model_facts
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, batches_of, plain_training
from tests.flow.models import TINY_SETTINGS, plain_batch, set_dropout, tiny_loaded

KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "scalars of layers": (
        "gemma4_text", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}, ("q_proj", "o_proj"),
    ),
    "a router's bias": ("deepseek_v3", {}, ("o_proj",)),
    "tied head": ("llama", {"tie_word_embeddings": True}, ("q_proj", "lm_head")),
    "tied embedding": ("llama", {"tie_word_embeddings": True}, ("q_proj", "embed_tokens")),
    "both ends of a tie": ("llama", {"tie_word_embeddings": True}, ("embed_tokens", "lm_head")),
    "head of its own": ("llama", {"tie_word_embeddings": False}, ("q_proj", "lm_head")),
    "tied head with tied biases": ("roberta", {"is_decoder": True}, ("query", "decoder")),
    "every linear layer of a mixture": ("mixtral", {}, ()),
    "every linear layer beside a shared expert": ("deepseek_v3", {}, ()),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def trained(kind: str) -> tuple[Any, set[str]]:
    """An adapted model in which nothing has its initial value, and the names of its persistent buffers."""
    model_type, fields, targets = KINDS[kind]
    model = tiny_loaded(model_type, **fields).model
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in model.state_dict().items() if name not in parameters}
    torch.manual_seed(1)
    for value in buffers.values():
        value.copy_(torch.rand_like(value) + 0.3)
    adapted = apply_lora(model, LoraSettings(r=4, target_modules=targets or "auto"), 0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    return adapted.eval(), set(buffers)


@pytest.mark.more(after=4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_export_computes_the_same(kind: str, tmp_path: Path) -> None:
    model, buffers = trained(kind)
    assert bool(buffers) == (KINDS[kind][0] in ("gemma4_text", "deepseek_v3"))
    tied = bool(model.get_base_model().config.tie_word_embeddings)
    export_model(tmp_path / "merged", model, lambda parameter: parameter.detach())
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    read, notes = loaded
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    assert read.config.tie_word_embeddings == (tied and kind == "scalars of layers")
    assert model.get_base_model().config.tie_word_embeddings == tied, "the model in training stays as it is"
    batch = plain_batch()
    with torch.no_grad():
        expected = model(input_ids=batch["input_ids"]).logits
        torch.testing.assert_close(read.eval()(input_ids=batch["input_ids"]).logits, expected, rtol=1e-3, atol=2e-4)


def test_a_tied_head_of_an_encoder_decoder_is_refused() -> None:
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )
    assert model.config.tie_word_embeddings
    with pytest.raises(
        ValueError, match=r"lm_head\.weight shares its weights with shared\.weight.*Leave out 'lm_head'"
    ):
        apply_lora(model, LoraSettings(r=4, target_modules=("q", "lm_head")), 0)


def test_a_tied_head_without_a_configuration_is_refused() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight
            self.experts = nn.Parameter(torch.zeros(2, 4, 4))
            self.up = nn.Linear(4, 4)

        def prepare_inputs_for_generation(self) -> None:
            """As peft wants it."""

    with pytest.raises(ValueError, match=r"head\.weight shares its weights with embed\.weight.*Leave out 'head'"):
        apply_lora(Own(), LoraSettings(r=2, target_modules=("head",)), 0)
    adapted = apply_lora(Own(), LoraSettings(r=2, target_modules=("up",)), 0)
    assert {name.split(".")[-4] for name, p in adapted.named_parameters() if p.requires_grad} == {"up"}


ENDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "embedding": ("llama", {}, ("q_proj", "embed_tokens")),
    "scaled and tied embedding": ("gemma3_text", {}, ("embed_tokens",)),
    "tied head": ("llama", {"tie_word_embeddings": True}, ("q_proj", "lm_head")),
    "both": ("gpt2", {}, ("wte", "lm_head")), "neither, in a mixture": ("mixtral", {}, ()),
}  # fmt: skip


def adapted(kind: str) -> LoadedModel:
    model_type, fields, targets = ENDS[kind]
    loaded = tiny_loaded(model_type, **fields)
    set_dropout(loaded.model, 0.0)
    model = apply_lora(loaded.model, LoraSettings(r=4, target_modules=targets or "auto"), seed=3)
    return replace(loaded, model=model.train(), facts=model_facts(model))


def streamed(kind: str, settings: StreamSettings) -> tuple[list[float], StreamEngine]:
    engine = build_stream_engine(adapted(kind), settings, device="cpu", pinned_grant=False)
    return [engine.train_step(batches_of(step), LR).loss for step in range(4)], engine


@pytest.mark.more(after=1)
@pytest.mark.parametrize("kind", ENDS)
def test_adapters_on_embedding_and_head_are_streamed(kind: str, engines: list[StreamEngine], tmp_path: Path) -> None:
    reference = adapted(kind)
    expected, _ = plain_training(reference, 4, max_norm=1.0)
    homes = {"nvme_path": str(tmp_path / "drive"), "state_ram_bytes": 0, "weight_ram_bytes": 0}
    for settings in (TINY_SETTINGS, replace(TINY_SETTINGS, **homes)):
        losses, engine = streamed(kind, settings)
        engines.append(engine)
        assert losses == pytest.approx(expected, rel=1e-5)
    engines[-1].export(tmp_path / "merged")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = plain_batch()["input_ids"]
    with torch.no_grad():
        wanted = reference.model.eval()(input_ids=ids).logits
        torch.testing.assert_close(read.eval()(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.more(after=1)
@pytest.mark.parametrize("kind", ["embedding", "scaled and tied embedding"])
def test_an_adapted_embedding_is_computed_in_tiles(kind: str, engines: list[StreamEngine]) -> None:
    whole, engine = streamed(kind, TINY_SETTINGS)
    engines.append(engine)
    tiled, engine = streamed(kind, replace(TINY_SETTINGS, tiling="on", tile_bytes=4096))
    engines.append(engine)
    assert parts_of(engine).units.embed.index in parts_of(engine).tile_plan.indices
    assert tiled == pytest.approx(whole, rel=1e-5)


def test_an_adapted_head_in_tiles_is_refused_with_the_reason() -> None:
    with pytest.raises(StreamUnsupported, match="leave it out of lora target_modules"):
        streamed("tied head", replace(TINY_SETTINGS, tiling="on", tile_bytes=4096))
