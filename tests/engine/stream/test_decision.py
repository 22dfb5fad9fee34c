"""What the planner is told of the streaming engine's decision."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outcore.common.quantities import GIB
from outcore.config import DeepSpeedFile, ProcessFacts, TrainConfig, resolve
from outcore.engine.base import Host
from outcore.engine.stream import blueprint
from outcore.engine.stream.blueprint import draw_blueprint
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.decision import decide
from outcore.model import ModelSettings
from outcore.sizing.streaming import LANE_BYTES, PROCESS_BYTES, RAM_RESERVE_BYTES
from outcore.sizing.training import TrainingPlacement, least_gradients
from tests.engine.even_model import EvenModel
from tests.flow.models import TINY_SETTINGS, tiny_loaded

LEFT_ALONE = PROCESS_BYTES + RAM_RESERVE_BYTES + LANE_BYTES


def test_forecast_and_engine_are_told_once_what_the_device_had_free(monkeypatch):
    """The forecast was made anew after the engine had taken its buffers, and planned with what they had left."""
    free_bytes = [8 * 10**9]
    settings = resolve(TrainConfig(), DeepSpeedFile(), ProcessFacts("bf16"))
    sizes = EvenModel(10**6, 10**6, 2, 64, (128,), 10**11, has_cuda=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(decide, "free_device_bytes", lambda device: free_bytes[0] if device.type == "cuda" else None)
    on_the_cpu = sizes.decide(settings)
    assert on_the_cpu.layout.device_bytes is None
    decision = replace(sizes, has_cuda=True).decide(settings)
    free_bytes[0] = 3 * 10**9
    assert decision.told.device_bytes == decision.layout.device_bytes == 8 * 10**9


def test_muons_matrices_of_an_own_class_are_counted_in_the_model_itself():
    """They were counted from its config, for which transformers has no model: the run was refused."""

    class OwnConfig(LlamaConfig):
        model_type = "own"

    class Own(LlamaForCausalLM):
        config_class = OwnConfig

    tiny = tiny_loaded("llama")
    own = replace(tiny, model=Own(OwnConfig(**tiny.config.to_dict())), config=OwnConfig(**tiny.config.to_dict()))
    settings = resolve(TrainConfig(optimizer="muon"), DeepSpeedFile(), ProcessFacts("fp32"))
    decision = decide.decide_stream(settings, ModelSettings(preset="tiny"), Host(False, 10**11, "run"), None, own)
    layers = own.model.model.layers.parameters()
    assert decision.placed.needs.muon_params == sum(p.numel() for p in layers if p.ndim == 2) > 0


@pytest.mark.parametrize("spare_bytes", [-1, 0])
def test_gradients_get_homes_as_far_as_ram_is_free(monkeypatch: pytest.MonkeyPatch, spare_bytes: int):
    """Else they share memory for three of the largest, unless told how much: then activation checkpoints have RAM of
    their own."""
    loaded = tiny_loaded("llama", num_hidden_layers=6)

    def placed(**told) -> TrainingPlacement:
        settings = replace(TINY_SETTINGS, max_grad_norm=0, activations="ram", step_tokens=(16, 16), **told)
        device = torch.device("cpu")
        return draw_blueprint(loaded, settings, device, trial=False, build=build_stream_engine).placed

    with monkeypatch.context() as patch:
        patch.setattr(blueprint, "available_ram_bytes", lambda: 10**12)
        whole = placed()
    needs = whole.needs
    free_bytes = blueprint.RAM_RESERVE_BYTES + needs.gradients + needs.states + whole.beyond + spare_bytes
    monkeypatch.setattr(blueprint, "available_ram_bytes", lambda: free_bytes)
    found, least = placed(), least_gradients(needs)
    assert least < needs.gradients and whole.has_homes and whole.beyond == 0 < sum(whole.lent)
    assert (found.has_homes, found.gradients) == ((True, needs.gradients) if spare_bytes == 0 else (False, least))
    assert found.beyond == (0 if spare_bytes == 0 else 4 * needs.checkpoint_ends[-1])
    assert placed(gradient_bytes=12345).gradients == 12345


@pytest.mark.parametrize("config, changes, why", [
    ({}, {}, ""),
    ({"max_grad_norm": 0.0}, {}, "no update waits for a norm"),
    ({"optimizer": "muon"}, {"muon_params": 10**6}, "Muon's updates are made in place"),
    ({}, {"num_ranks": 2}, "states of several ranks"),
])  # fmt: skip
@pytest.mark.parametrize("told_gib, has_cuda", [(1.5, False), (None, True), (None, False)])
def test_updates_ahead_of_the_norm_where_they_can_be(config, changes, why, told_gib, has_cuda):
    """Half of what is idle by default, beside process, page cache, lanes and the run's own 14 MB."""
    settings = resolve(TrainConfig(ahead_gib=told_gib, **config), DeepSpeedFile(), ProcessFacts("bf16"))
    decision = EvenModel(10**6, 10**6, 2, 64, (128,), 10**11, has_cuda, **changes).decide(settings)
    said = [note for note in decision.notes if "ahead_gib" in note]
    wanted = 3 << 29 if told_gib else (10**11 - LEFT_ALONE - 14 * 10**6) // 2 if has_cuda else 0
    assert decision.told.ahead_bytes == decision.layout.ahead_bytes == (0 if why else wanted)
    assert len(said) == bool(why and told_gib) and all(why in note for note in said)


@pytest.mark.parametrize("told_gib, said", [(0.005, ""), (1.0, "ahead_gib: 11.44 MiB may be taken, and"), (None, "")])
def test_more_ram_for_updates_ahead_than_is_idle_is_said(told_gib, said):
    settings = resolve(TrainConfig(ahead_gib=told_gib), DeepSpeedFile(), ProcessFacts("bf16"))
    available = LEFT_ALONE + 24 * 10**6  # less the run's own 14 MB: 10 MB
    decision = EvenModel(10**6, 10**6, 2, 64, (128,), available, True).decide(settings)
    found = [warning for warning in decision.warnings if "ahead_gib" in warning]
    assert len(found) == bool(said) and all(said in warning and "9.54 MiB of RAM idle" in warning for warning in found)
    assert decision.told.ahead_bytes == (5 * 10**6 if told_gib is None else int(told_gib * GIB))


def test_no_update_is_ahead_of_states_on_a_drive(tmp_path):
    config = TrainConfig(ahead_gib=1.0, ram_budget_gib=0.0, nvme_offload_path=str(tmp_path))
    settings = resolve(config, DeepSpeedFile(), ProcessFacts("bf16"))
    sizes = EvenModel(10**6, 10**6, 2, 64, (128,), 10**11, False)
    decision = sizes.decide(settings, nvme_check=lambda folder, needed_gb: (True, ""))
    assert decision.told.ahead_bytes == 0
    assert "ahead_gib is not used: states on the drive are updated on their way" in decision.notes
