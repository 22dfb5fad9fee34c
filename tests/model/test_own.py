"""A user's own module: the example learns, and modules that break the contract are refused."""

from pathlib import Path

import pytest
import torch

from outcore.model import ModelSettings, generate_tokens, load_model
from outcore.model.hook import build_from_module

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLE = Path(__file__).parents[2] / "examples" / "my_model.py"


def test_the_example_learns():
    settings = ModelSettings(
        model_module=f"{EXAMPLE}:build", precision="fp32", vocab_size=64, config_overrides={"width": 32, "depth": 2}
    )
    loaded = load_model(settings)
    assert loaded.loss_fn is not None and not loaded.abilities.packing and loaded.config is None
    assert loaded.facts.total_params == sum(p.numel() for p in loaded.model.parameters())
    loss = loaded.token_loss()
    ids = torch.arange(160).reshape(1, -1) % 64
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        objective = loss(loaded.model, batch).objective(159)
        objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(objective.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert len(generate_tokens(loaded.model, ids[:, :4], 3)) == 3


def test_the_example_is_causal_and_carries_state_over_blocks():
    settings = ModelSettings(
        model_module=f"{EXAMPLE}:build", precision="fp32", vocab_size=64, config_overrides={"width": 32, "depth": 2}
    )
    model = load_model(settings).model
    ids = torch.randint(0, 64, (1, 150))
    changed = ids.clone()
    changed[0, 100] = (changed[0, 100] + 1) % 64
    with torch.no_grad():
        a, b = model(ids), model(changed)
    assert torch.equal(a[:, :100], b[:, :100])
    assert not torch.allclose(a[0, 130], b[0, 130], atol=1e-6)


@pytest.mark.parametrize(("source", "function", "words"), [
    ("def make(config, tokenizer): pass", "build", "It defines make"),
    ("def biuld(config, tokenizer): pass", "build", "Did you mean 'biuld'"),
    ("x = 1", "build", "It defines no functions"), ("def build(config): pass", "build", "cannot be called as build"),
    ("def build(config, tokenizer): return 3", "build", "it returned int"),
    ("import torch\ndef build(c, t): return torch.nn.Linear(1, 1), 3", "build", "must be a function"),
    ("import torch\ndef build(c, t): return torch.nn.Linear(1, 1), lambda: 0", "build", "cannot be called as loss"),
    ("import torch\ndef build(c, t): return torch.nn.ReLU()", "build", "no parameter that trains"),
    ("1 / 0", "build", "ZeroDivisionError"), ("def build(:", "build", "SyntaxError"),
])  # fmt: skip
def test_modules_that_break_the_contract(tmp_path, source, function, words):
    path = tmp_path / "own.py"
    path.write_text(source)
    with pytest.raises(ValueError) as caught:
        build_from_module(ModelSettings(model_module=f"{path}:{function}"), None)
    assert words in str(caught.value)


def test_a_module_file_that_is_missing(tmp_path):
    (tmp_path / "own.py").write_text("")
    with pytest.raises(ValueError, match=r"Did you mean 'own\.py'"):
        load_model(ModelSettings(model_module=f"{tmp_path / 'owm.py'}:build"))
    with pytest.raises(ValueError, match=r"/mnt/c/own\.py"):
        load_model(ModelSettings(model_module="C:\\own.py:build"))
    (tmp_path / "own.txt").write_text("")
    with pytest.raises(ValueError, match=r"must end in \.py"):
        load_model(ModelSettings(model_module=f"{tmp_path / 'own.txt'}:build"))
