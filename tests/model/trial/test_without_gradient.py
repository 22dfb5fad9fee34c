"""Weights that no loss of tokens reaches are left alone, as torch's AdamW leaves them, by whatever engine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from outcore.engine.stream.build import build_stream_engine
from outcore.model import ModelSettings, load_model
from outcore.model.trial.abilities import freeze, pattern_of, without_gradient
from tests.engine.inside import parts_of
from tests.flow.models import TINY_SETTINGS, needs, plain_batch, tiny_loaded

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", [pytest.param("deepseek_v32", marks=needs("deepseek_v32")), "bert", "llama"])
def test_what_the_loss_never_reaches_is_frozen_said_and_never_decayed(engines, tmp_path, name, lazy):
    fields = {"is_decoder": True, "add_cross_attention": True} if name == "bert" else {}
    config = tiny_loaded(name, **fields).config
    (tmp_path / "shape.json").write_text(json.dumps(config.to_dict()))
    loaded = load_model(
        ModelSettings(config_file=str(tmp_path / "shape.json"), precision="fp32", seq_length=32), lazy=lazy
    )
    word = {"deepseek_v32": "indexer", "bert": "crossattention"}.get(name)
    frozen = {n for n, p in loaded.model.named_parameters() if not p.requires_grad}
    assert {word in n for n in frozen} == ({True} if word else set())
    assert any("left alone" in note for note in loaded.notes) == bool(word)
    if lazy:
        return
    before = {n: p.detach().clone() for n, p in loaded.model.named_parameters()}
    settings = replace(TINY_SETTINGS, weight_decay=0.5)
    engines.append(build_stream_engine(loaded, settings, device="cpu", pinned_grant=False, trial=False))
    engines[-1].train_step([plain_batch()], 1e-2)
    parts_of(engines[-1]).updates.drain()
    same = {n for n, p in loaded.model.named_parameters() if torch.equal(p, before[n])}
    assert same == {n for n in before if n in frozen}


class Mixture(nn.Module):
    """Experts of which some get no token, and a weight that only picks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 8)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.picks = nn.ModuleList([nn.Linear(8, 1) for _ in range(2)])

    def forward(self, input_ids, **_):
        hidden = self.embed(input_ids)
        order = self.picks[1](hidden).squeeze(-1).argsort(1)
        hidden = self.experts[1](hidden).gather(1, order[..., None].expand_as(hidden))
        return type("Output", (), {"logits": hidden @ self.embed.weight.T})


def test_an_expert_without_a_token_is_trained_as_its_siblings_are():
    model = Mixture()
    assert without_gradient(model) == {"picks.*.weight", "picks.*.bias"}
    assert freeze(model, without_gradient(model)) == [f"picks.{i}.{n}" for i in (0, 1) for n in ("weight", "bias")]
    assert without_gradient(model) == frozenset()
    assert pattern_of("base_model.model.layers.3.experts.12.w1.weight") == "layers.*.experts.*.w1.weight"
