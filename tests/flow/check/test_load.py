"""From `load_model` to a streaming engine, as a training run does it."""

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.check.gradients import why_not_trained
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import StreamUnsupported
from outcore.model import LoraSettings, ModelSettings, load_model

OVERRIDES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
pytestmark = pytest.mark.usefixtures("one_thread")


LORA = LoraSettings(r=4, alpha=8, dropout=0.0)


@pytest.mark.parametrize(("preset", "lora"), [("llama-1b", None), ("llama-1b", LORA), ("tiny-moe", None)])
def test_a_preset_is_loaded_streamed_and_trained(preset, lora, tmp_path):
    settings = ModelSettings(
        preset=preset,
        precision="bf16",
        seq_length=64,
        gradient_checkpointing=True,
        config_overrides=OVERRIDES,
        lora=lora,
    )
    loaded = load_model(settings)
    engine = build_stream_engine(
        loaded,
        StreamSettings(
            staging_bytes=8 * MIB, slot_bytes=65536, num_slots=2, optimizer_threads=1, optimizer_backend="torch"
        ),
        device="cpu",
        pinned_grant=False,
    )
    try:
        ids = torch.randint(2, 300, (2, 24), generator=torch.Generator().manual_seed(0))
        losses = [engine.train_step([{"input_ids": ids, "labels": ids}], 1e-2).loss for _ in range(8)]
        assert losses[-1] < losses[0] - 0.05
        assert engine.evaluate([{"input_ids": ids, "labels": ids}]).loss < losses[0]
        engine.export(tmp_path / "final")
        assert (tmp_path / "final" / "model.safetensors").exists()
    finally:
        engine.close()


def test_an_encoder_decoder_is_refused_with_the_reason():
    loaded = load_model(ModelSettings(preset="tiny-t5", precision="fp32", seq_length=64, vocab_size=300))
    with pytest.raises(StreamUnsupported, match="two stacks of layers"):
        build_stream_engine(loaded, StreamSettings(), device="cpu")
    assert "two stacks" in why_not_trained(loaded)
