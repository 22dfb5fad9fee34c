"""The optimizer in RAM beside torch's, and resuming inside a trainer's loop."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import outcore.hf
from tests.hf.callers import TRAINERS, tiny
from tests.hf.test_what_callers_do import gradients

pytestmark = pytest.mark.usefixtures("one_thread")


def steps(model: Any, optimizer: Any, num: int, max_norm: float | None = None) -> None:
    for _ in range(num):
        gradients(model)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def test_weights_are_those_of_torch_with_exact_clipping() -> None:
    plain, streamed = tiny().train(), outcore.hf.stream(tiny().train())
    norms = [p for p in plain.parameters() if p.ndim < 2]
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0},
    ]
    steps(plain, torch.optim.AdamW(groups, lr=1e-2), 5, max_norm=0.1)
    ours = outcore.hf.optimizer(streamed, 1e-2, weight_decay=0.1, max_grad_norm=0.1)
    steps(streamed, ours, 5)
    assert ours.grad_norm is not None and ours.grad_norm > 0.1
    for (name, p), q in zip(plain.named_parameters(), streamed.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("states", ["fp32", "fp32_m8"])
def test_states_that_were_saved_go_on_bit_for_bit(states: str, tmp_path: Path) -> None:
    model = outcore.hf.stream(tiny().to(torch.bfloat16).train())
    optimizer = outcore.hf.optimizer(model, 1e-2, states=states)
    steps(model, optimizer, 3)
    other = copy.deepcopy(model)
    again = outcore.hf.optimizer(other, 5.0, states=states)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert again.param_groups[0]["lr"] == 1e-2
    steps(model, optimizer, 3)
    steps(other, again, 3)
    for (name, p), q in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name
    with pytest.raises(ValueError, match="groups"):
        outcore.hf.optimizer(outcore.hf.stream(tiny("gpt2"))).load_state_dict(optimizer.state_dict())


def test_weights_that_somebody_else_changed_are_trained_from_there() -> None:
    found = []
    for changed in (0, 1):
        model = outcore.hf.stream(tiny().to(torch.bfloat16).train())
        optimizer = outcore.hf.optimizer(model, 1e-3)
        steps(model, optimizer, changed)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        model.load_state_dict({name: torch.full_like(p, 0.5) for name, p in model.state_dict().items()})
        steps(model, optimizer, 1)
        found.append(model.state_dict())
    assert all(torch.equal(p, found[1][name]) and bool((p == 0.5).all()) for name, p in found[0].items())


def test_a_weight_that_is_not_contiguous_is_trained() -> None:
    """It is updated in a copy, which stayed there."""
    values = torch.linspace(-1, 1, 12).view(3, 4)
    plain, ours = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=False)
    plain.weight, ours.weight = torch.nn.Parameter(values.T.contiguous()), torch.nn.Parameter(values.clone().T)
    for model, optimizer in (
        (plain, torch.optim.AdamW(plain.parameters(), 0.1, weight_decay=0.0)),
        (ours, outcore.hf.optimizer(ours, 0.1)),
    ):
        for _ in range(2):
            optimizer.zero_grad()
            model(values[:, :3]).square().sum().backward()
            optimizer.step()
    assert not ours.weight.is_contiguous()
    torch.testing.assert_close(ours.weight, plain.weight)


@pytest.mark.parametrize("max_norm", [float("inf"), 0.05])
def test_a_trainer_clips_and_asks_for_the_norm_as_of_plain_gradients(max_norm: float) -> None:
    """Also after more was added, and after somebody changed a gradient in place."""
    found = []
    for is_ours in (False, True):
        model = outcore.hf.stream(tiny().train())
        if is_ours:
            kept = outcore.hf.optimizer(model, 1e-2)
        norms = []
        for _ in range(2):
            gradients(model)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
            for p in model.parameters():
                p.grad[0].add_(0.5)
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            norms.append(torch.linalg.vector_norm(model.lm_head.weight.grad, 1))
            norms.append(torch.linalg.vector_norm(model.lm_head.weight.grad, dim=0))
        found.append((norms, [p.grad for p in model.parameters()]))
    assert kept.param_groups
    for theirs, ours in zip(*(norms for norms, _ in found), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
    for theirs, ours in zip(*(grads for _, grads in found), strict=True):
        assert max_norm < 1 or torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs)
        for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), ours.clone()):
            assert type(copied) is torch.Tensor and torch.equal(copied, ours)


def test_a_gradients_norm_is_that_of_its_values_whoever_changed_or_holds_them() -> None:
    """Past torch's count of versions, too, and of one that no parameter has any more."""
    model = outcore.hf.stream(tiny().train())
    kept = outcore.hf.optimizer(model, 1e-2)
    gradients(model)
    grads = [p.grad for p in model.parameters()]
    whole = torch.nn.utils.get_total_norm(grads)
    for p in model.parameters():
        p.grad.data.mul_(0.5)
    torch.testing.assert_close(torch.nn.utils.get_total_norm(grads), whole / 2)
    for p in model.parameters():
        p.grad.data = p.grad.data / 2
    torch.testing.assert_close(torch.nn.utils.get_total_norm(grads), whole / 4)
    grads[0].numpy(force=True)[:] = 0.0
    assert torch.linalg.vector_norm(grads[0]) == 0
    kept.zero_grad()
    gradients(model)
    held = [p.grad for p in model.parameters()]
    kept.zero_grad()
    torch.testing.assert_close(torch.nn.utils.get_total_norm(held), whole)


def test_copies_of_gradients_are_each_ones_own() -> None:
    model = outcore.hf.stream(tiny().train())
    kept = outcore.hf.optimizer(model, 1e-2)
    gradients(model)
    grads = [p.grad for p in model.parameters()]
    for copied, grad in zip(copy.deepcopy(grads), grads, strict=True):
        assert torch.equal(copied, grad)
    one, other = copy.deepcopy([grads[0], grads[0]])
    assert one is other and type(one) is torch.Tensor and kept.param_groups
    linear = torch.nn.Linear(2, 2)
    kept = outcore.hf.optimizer(linear)
    linear(torch.ones(1, 2)).square().sum().backward(create_graph=True)
    assert linear.weight.grad is not None and linear.weight.grad.requires_grad


def test_gradients_take_the_memory_of_those_that_were_let_go() -> None:
    model = outcore.hf.stream(tiny().train())
    layer = [p for name, p in model.named_parameters() if ".layers." in name]

    def step() -> set[int]:
        gradients(model)
        return {p.grad.data_ptr() for p in layer}

    first = step()
    model.zero_grad()
    assert step() == first
    held = {p: p.grad for p in layer}
    values = {p: grad.clone() for p, grad in held.items()}
    model.zero_grad()
    with torch.no_grad():
        layer[0].add_(1.0)
    assert step().isdisjoint(first)
    assert all(torch.equal(held[p], values[p]) for p in layer), "somebody looks at them still"


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = outcore.hf.stream(tiny())
    optimizer = outcore.hf.optimizer(model, 1e-2, max_grad_norm=1.0)
    gradients(model)
    model.lm_head.weight.grad[0, 0] = float("nan")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    with pytest.raises(ValueError, match="nothing of this model is trained"):
        outcore.hf.optimizer(model.requires_grad_(False))


@pytest.mark.more(after=2)
@pytest.mark.parametrize(
    ("which", "lora", "own"), [("trainer", False, True), ("trainer", False, False), ("dpo", True, False)]
)
def test_a_trainer_that_is_resumed_goes_on_bit_for_bit(which: str, lora: bool, own: bool, tmp_path: Path) -> None:
    def run(out: Path, *, ends: int = 6, resume: Path | None = None, prepare: Any = outcore.hf.stream) -> Any:
        model = prepare(tiny("gpt2", lora=lora, dropout=0.1))
        more: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0 if own else 0.5}
        trainer = TRAINERS[which](model, out, 6, **more)
        if own:
            trainer.optimizer = outcore.hf.optimizer(model, 1e-2, max_grad_norm=0.5)
        if ends < 6:
            trainer.add_callback(_stop_at(ends))
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return {name: p.clone() for name, p in trainer.model.state_dict().items()}

    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", ends=3)
    resumed = run(tmp_path / "cut", resume=tmp_path / "cut" / "checkpoint-3")
    assert all(torch.equal(p, resumed[name]) for name, p in whole.items())
    if not own:
        plain = run(tmp_path / "plain", prepare=lambda model: model)
        assert all(torch.equal(p, whole[name]) for name, p in plain.items())
        theirs = json.loads((tmp_path / "plain/checkpoint-6/trainer_state.json").read_text())["log_history"]
        ours = json.loads((tmp_path / "whole/checkpoint-6/trainer_state.json").read_text())["log_history"]
        assert [entry["grad_norm"] for entry in theirs] == [entry["grad_norm"] for entry in ours]
        name = "adapter_model.safetensors" if lora else "model.safetensors"
        saved = load_file(tmp_path / "plain/checkpoint-6" / name), load_file(tmp_path / "whole/checkpoint-6" / name)
        assert list(saved[0]) == list(saved[1])
        assert all(torch.equal(tensor, saved[1][key]) for key, tensor in saved[0].items())


def _stop_at(step: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= step

    return Stop()
