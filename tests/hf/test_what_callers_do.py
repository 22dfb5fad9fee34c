"""What a caller may do to a streamed model: each works as on the plain one, or is refused in a sentence."""

from __future__ import annotations

import copy
import io
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore.hf
from outcore.common.quantities import GIB
from outcore.flow import StreamUnsupported
from outcore.hf.homes import LastingMemory
from outcore.hf.stack import LayerStack
from tests.forked import ROOT
from tests.hf.callers import assert_same, tiny, trained, with_lora

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(48).view(4, 12) % 40 + 4


def gradients(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    """Gradients by name of a loss on rows of different length."""
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0
    model(**{"input_ids": IDS, "attention_mask": mask, "labels": IDS} | inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_as_plain(do: Callable[[Any], Any], family: str = "llama", **more: Any) -> None:
    """Done before a step and after one, it leaves the bits that it leaves of the plain model."""
    found = []
    for prepare in (lambda model: model, outcore.hf.stream):
        model = prepare(tiny(family, **more)).train()
        model = do(model) or model
        first = gradients(model)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad)
        model.zero_grad()
        model = do(model) or model
        found.append((first, gradients(model), {n: p.detach().clone() for n, p in model.named_parameters()}))
    for plain, streamed in zip(*found, strict=True):
        assert list(plain) == list(streamed)
        assert not [name for name, tensor in plain.items() if not torch.equal(tensor, streamed[name])]


def _move(model: Any) -> None:
    model.to("cpu").cpu().to(torch.device("cpu"), non_blocking=True)


def _types(model: Any) -> None:
    model.to(torch.float64).half().float()


def _hooked(model: Any) -> None:
    inner = next(m for name, m in model.named_modules() if name.endswith("layers.1.mlp"))
    inner.register_forward_hook(lambda module, args, output: output * 0.5)
    layer = next(m for name, m in model.named_modules() if name.endswith("layers.0"))
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    next(model.parameters()).register_hook(lambda grad: grad * 3)
    layer.mlp.down_proj.weight.register_hook(lambda grad: grad * 5)


def _checkpointed(model: Any) -> None:
    model.activation_checkpointing_enable()


def _checkpointed_by_reentrance(model: Any) -> None:
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()


def _resized(model: Any) -> None:
    torch.manual_seed(3)
    model.resize_token_embeddings(320)


def _merged(model: Any) -> Any:
    if hasattr(model, "peft_config"):
        return model.merge_and_unload().requires_grad_(True)
    return with_lora(model)


def _loaded(model: Any) -> None:
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})


def _assigned(model: Any) -> None:
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()}, assign=True)
    model.requires_grad_(True)


def _averaged(model: Any) -> None:
    """As a callback with a moving average does: through `.data`."""
    for p in model.parameters():
        p.data.mul_(0.9)
    for name, p in model.named_parameters():
        if "layers.1" in name:
            p.data = p.data * 0.9
        if "q_proj.weight" in name and p.shape[0] == p.shape[1]:
            p.data = p.data.t()  # the same memory


def _averaged_by_torch(model: Any) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert torch.equal(average(input_ids=IDS).logits, model(input_ids=IDS).logits)


def _replaced(model: Any) -> None:
    """A layer's module becomes another one with other parameters."""
    layer = next(m for name, m in model.named_modules() if name.endswith("layers.1"))
    torch.manual_seed(5)
    layer.mlp.up_proj = nn.Linear(layer.mlp.up_proj.in_features, layer.mlp.up_proj.out_features, bias=True)


def _frozen(model: Any) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_("layers.0" not in name and "embed" not in name)


def _copied(model: Any) -> Any:
    return copy.deepcopy(model)


def _pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _saved_whole(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _generated(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        model.generate(IDS[:, :4], max_new_tokens=3, do_sample=False)
    model.train()


def _inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model(input_ids=IDS)


def _broken_off(model: Any) -> None:
    """Somebody's hook fails in mid-pass, forward and backward, and goes away."""
    layer = next(m for name, m in model.named_modules() if name.endswith("layers.1"))

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    for hook in (layer.mlp.register_forward_hook(fail), layer.self_attn.q_proj.weight.register_hook(fail)):
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=IDS, labels=IDS).loss.backward()
        hook.remove()
    model.zero_grad()


def _forgotten(model: Any) -> None:
    """A loss that nobody goes back from, and one gone back from twice."""
    model(input_ids=IDS, labels=IDS)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward(retain_graph=True)
    loss.backward()


def _beside_another(model: Any) -> None:
    other = outcore.hf.stream(tiny("qwen3"))
    (model(input_ids=IDS, labels=IDS).loss + other(input_ids=IDS, labels=IDS).loss).backward()


def _penalised(model: Any) -> None:
    """Gradients by `torch.autograd.grad`, of some parameters."""
    wanted = [p for name, p in model.named_parameters() if "mlp" in name and p.requires_grad]
    found = torch.autograd.grad(model(input_ids=IDS, labels=IDS).loss, wanted)
    for p, grad in zip(wanted, found, strict=True):
        p.grad = grad


WORKS: dict[str, Callable[[Any], Any]] = {
    ".to(), .cpu()": _move,
    ".to(float64), .half(), .float()": _types,
    "hooks on layers, inner modules and parameters": _hooked,
    "activation checkpointing": _checkpointed,
    "activation checkpointing, reentrant": _checkpointed_by_reentrance,
    "resize_token_embeddings": _resized,
    "get_peft_model, merge_and_unload": _merged,
    "load_state_dict": _loaded,
    "load_state_dict(assign=True)": _assigned,
    "weights changed through .data": _averaged,
    "torch's AveragedModel beside it": _averaged_by_torch,
    "a module of a layer replaced": _replaced,
    "requires_grad changed": _frozen,
    "deepcopy": _copied,
    "pickle": _pickled,
    "torch.save of the model": _saved_whole,
    "generate": _generated,
    "inference_mode": _inference_mode,
    "an exception in mid-pass": _broken_off,
    "losses dropped, and used twice": _forgotten,
    "two models at once": _beside_another,
    "torch.autograd.grad": _penalised,
}


@pytest.mark.parametrize("what", WORKS)
def test_what_works_leaves_the_bits_of_the_plain_model(what: str) -> None:
    assert_as_plain(WORKS[what])


def test_several_uses_in_one_backward_add_up_as_in_the_plain_model() -> None:
    def twice(model: Any) -> None:
        model(input_ids=IDS, labels=IDS).loss.backward()
        one, two = (model(input_ids=IDS[:, at:], labels=IDS[:, at:]).loss for at in (0, 3))
        (one * two).backward()

    assert_as_plain(twice)


def test_hidden_states_attentions_and_routers_are_those_of_the_plain_model() -> None:
    wanted = {"output_hidden_states": True, "output_router_logits": True, "output_attentions": True}
    found = []
    for prepare in (lambda model: model, outcore.hf.stream):
        model = tiny("mixtral")
        model.set_attn_implementation("eager")
        model = prepare(model).train()
        output = model(input_ids=IDS, labels=IDS, **wanted)
        loss = output.loss + sum(h.float().pow(2).mean() for h in output.hidden_states)
        (loss + sum(a.pow(2).mean() for a in output.attentions)).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append(([*output.hidden_states, *output.router_logits, *output.attentions], grads))
    (tensors, grads), (tensors_too, grads_too) = found
    assert len(tensors) == len(tensors_too) > 4
    assert all(map(torch.equal, tensors, tensors_too))
    for name, grad in grads.items():  # of hidden states that are used twice the engine adds up in another order
        torch.testing.assert_close(grads_too[name], grad, rtol=1e-5, atol=1e-7)


def test_dropout_draws_what_it_draws_in_the_plain_model(tmp_path: Path) -> None:
    plain = trained("sft", "gpt2", tmp_path / "plain", lora=True, dropout=0.1)
    assert_same(plain, trained("sft", "gpt2", tmp_path / "x", lora=True, dropout=0.1, prepare=outcore.hf.stream))


def test_answers_with_a_cache_are_those_of_the_plain_model() -> None:
    for family in ("llama", "gemma3_text", "mixtral"):
        plain, streamed = tiny(family).eval(), outcore.hf.stream(tiny(family)).eval()
        for how in ({"do_sample": False}, {"num_beams": 2, "do_sample": False}):
            wanted = plain.generate(IDS, max_new_tokens=6, **how)
            assert torch.equal(wanted, streamed.generate(IDS, max_new_tokens=6, **how)), family
        first = streamed(input_ids=IDS, use_cache=True)  # with gradient: the cache is filled all the same
        with torch.no_grad():
            again = streamed(input_ids=IDS[:, :1], past_key_values=first.past_key_values)
            wanted = plain(input_ids=IDS[:, :1], past_key_values=plain(input_ids=IDS, use_cache=True).past_key_values)
        assert torch.equal(wanted.logits, again.logits)


def test_a_batch_cut_into_rows_gives_the_same_gradients_with_less_room() -> None:
    """Hidden states then wait in RAM, too."""
    for family in ("llama", "mixtral", "gpt2"):
        plain = tiny(family, num_hidden_layers=5).train()
        wanted = gradients(plain)
        ends_bytes = sum(p.nbytes for name, p in plain.named_parameters() if not re.search(r"\.\d+\.", name))
        model = outcore.hf.stream(tiny(family, num_hidden_layers=5).train(), vram_gib=(ends_bytes + 1024) / GIB)
        widths: list[int] = []
        mlp = next(m for name, m in model.named_modules() if re.search(r"\.0\.mlp$", name))
        mlp.register_forward_pre_hook(lambda module, args, widths=widths: widths.append(len(args[0])))
        found = gradients(model)
        assert widths == [1] * 8, "four rows, forward and again in the backward"
        for name, grad in wanted.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


def test_gradients_of_full_training_take_room_of_their_own(only_own_models: None) -> None:
    """The same bound that holds a whole batch of a frozen model cuts it where all of it is trained."""
    widths: list[int] = []
    model = tiny(num_hidden_layers=5).train().requires_grad_(False)
    layer_bytes = sum(p.nbytes for p in model.model.layers[0].parameters())
    ends_bytes = sum(p.nbytes for p in model.parameters()) - 5 * layer_bytes
    model = outcore.hf.stream(model, vram_gib=(ends_bytes + 2 * layer_bytes + 1_000_000) / GIB)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: widths.append(len(args[0])))
    for is_trained in (False, True, False):
        model.requires_grad_(is_trained)
        loss = model(input_ids=IDS, labels=IDS).loss
        if is_trained:
            loss.backward()
    assert widths == [4, *[1] * 8, 4], "only where all is trained: row by row, forward and again in the backward"


def test_models_of_one_process_share_the_budget(only_own_models: None) -> None:
    """What another one holds on the device, the first has no room for: its batches are cut as if it had been told so
    much less."""
    widths: list[int] = []
    model = tiny(num_hidden_layers=5).requires_grad_(False)
    layer_bytes = sum(p.nbytes for p in model.model.layers[0].parameters())
    ends_bytes = sum(p.nbytes for p in model.parameters()) - 5 * layer_bytes
    vram_gib = (ends_bytes + 2 * layer_bytes + 1_000_000) / GIB
    for beside in (0, 1, 0):
        others = [outcore.hf.stream(tiny("qwen3", hidden_size=1024)) for _ in range(beside)]
        policy = outcore.hf.stream(copy.deepcopy(model), vram_gib=vram_gib)
        policy.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: widths.append(len(args[0])))
        policy(input_ids=IDS)
        del policy, others
    assert widths == [4, 1, 1, 1, 1, 4]


def test_a_loader_with_workers_and_threads_changes_nothing(tmp_path: Path) -> None:
    plain = trained("trainer", "llama", tmp_path / "plain")
    more: dict[str, Any] = {"dataloader_num_workers": 2, "dataloader_pin_memory": False}
    assert_same(plain, trained("trainer", "llama", tmp_path / "x", prepare=outcore.hf.stream, **more))


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_frozen_weights_on_a_drive_train_the_same(quantize: str | None, tmp_path: Path) -> None:
    losses, wanted = trained(
        "sft", "llama", tmp_path / "ram", lora=True, prepare=lambda model: outcore.hf.stream(model, quantize=quantize)
    )
    drive = tmp_path / "drive"
    found = trained(
        "sft", "llama", tmp_path / "out", lora=True,
        prepare=lambda model: outcore.hf.stream(model, nvme=drive, ram_gib=1e-4, quantize=quantize),
    )  # fmt: skip
    kept = {key: tensor for key, tensor in wanted.items() if key in found[1]}
    assert len(kept) < len(wanted), "frozen weights have no values in RAM"
    assert_same((losses, kept), found)


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "streamed twice": (outcore.hf.stream, StreamUnsupported, "streamed already"),
    "past keys with gradient": (
        lambda m: m(input_ids=IDS, past_key_values=m(input_ids=IDS, use_cache=True).past_key_values),
        RuntimeError,
        "past keys in a pass with gradient",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_says_why(what: str) -> None:
    do, kind, words = REFUSED[what]
    with pytest.raises(kind, match=words):
        do(outcore.hf.stream(tiny()).eval())


def test_models_that_cannot_be_streamed_are_left_as_they_are() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

    with pytest.raises(StreamUnsupported, match="has no list of layers"):
        outcore.hf.stream(Plain())
    model = tiny()
    model.model.layers[0].forward = model.model.layers[0].forward
    with pytest.raises(StreamUnsupported, match="device_map"):
        outcore.hf.stream(model)
    with pytest.raises(StreamUnsupported, match="not in memory"):
        outcore.hf.stream(tiny().to("meta"))
    with pytest.raises(ValueError, match="nvme_offload_path, a folder"):
        outcore.hf.stream(tiny(), ram_gib=1)
    with pytest.raises(ValueError, match="raise vram_gib"):
        outcore.hf.stream(tiny(), vram_gib=1e-6)


def test_a_copy_is_a_model_of_its_own() -> None:
    model = outcore.hf.stream(tiny()).train()
    gradients(model)
    other = copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert torch.equal(other(input_ids=IDS).logits, tiny()(input_ids=IDS).logits)


def test_what_was_read_stays_when_the_layers_get_other_homes() -> None:
    model = outcore.hf.stream(tiny()).train()
    gradients(model)
    held = model.state_dict()
    before = {name: tensor.clone() for name, tensor in held.items()}
    _assigned(model)
    gradients(model)
    outcore.hf.stream(tiny("qwen3"))(input_ids=IDS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())


def test_two_threads_at_once_are_refused() -> None:
    model = outcore.hf.stream(tiny())
    inside, ended = threading.Event(), threading.Event()
    model.model.layers[0].mlp.register_forward_hook(lambda *_: (inside.set(), ended.wait(20), None)[2])
    thread = threading.Thread(target=lambda: model(input_ids=IDS))
    thread.start()
    inside.wait(20)
    with pytest.raises(RuntimeError, match="two threads"):
        model(input_ids=IDS)
    ended.set()
    thread.join()


@pytest.mark.more
@pytest.mark.filterwarnings("ignore")
def test_torch_compile_leaves_layers_to_their_visits() -> None:
    plain, streamed = tiny().train(), torch.compile(outcore.hf.stream(tiny().train()), backend="eager")
    wanted, found = gradients(plain), gradients(streamed)
    assert all(torch.equal(grad, found[f"_orig_mod.{name}"]) for name, grad in wanted.items())


IN_A_GROUP = """
import sys, torch, outcore.hf
from tests.hf.test_what_callers_do import gradients, tiny
wanted = gradients(tiny().train())
torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
found = gradients(torch.nn.parallel.DistributedDataParallel(outcore.hf.stream(tiny().train())))
assert all(torch.equal(grad, found[f"module.{name}"]) for name, grad in wanted.items())
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
cpu = torch.device("cpu")
for wrap in (
    lambda model: FullyShardedDataParallel(model, device_id=cpu),
    lambda model: FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True),
    lambda model: [*map(fully_shard, model.model.layers), fully_shard(model)][-1],
):
    try:
        gradients(wrap(outcore.hf.stream(tiny().train())))
    except RuntimeError as error:
        assert "leave the sharding out" in str(error), error
    else:
        raise AssertionError("FSDP was let through")
"""


@pytest.mark.more
def test_ddp_sums_what_streaming_gives_and_fsdp_is_refused(tmp_path: Path) -> None:
    """In a process of its own: a group that ends takes those of other tests with it."""
    asked = [sys.executable, "-c", IN_A_GROUP, f"file://{tmp_path}/rendezvous"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_mixed_precision_in_fp16_is_refused_on_a_gpu() -> None:
    """torch's GradScaler would read factors that have not arrived."""
    from outcore.hf.visit import refuse_scaled_gradients

    with pytest.raises(RuntimeError, match="Train in bf16"):
        refuse_scaled_gradients(torch.device("cuda", 0), True, torch.float16)
    refuse_scaled_gradients(torch.device("cuda", 0), True, torch.bfloat16)
    refuse_scaled_gradients(torch.device("cpu"), True, torch.float16)


def test_autocast_is_that_of_the_forward() -> None:
    found = []
    for prepare in (lambda model: model, outcore.hf.stream):
        model = prepare(tiny().train())
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


def test_gradients_are_not_computed_under_autocast() -> None:
    """What a layer computes in fp32 within autocast has its gradient in fp32."""

    class Exact(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    found = []
    for prepare in (lambda model: model, outcore.hf.stream):
        model = tiny().train()
        for layer in model.model.layers:
            layer.mlp.gate_proj.__class__ = Exact
        model = prepare(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert not [name for name, grad in found[0].items() if not torch.equal(grad, found[1][name])]


def test_hidden_states_of_batches_of_many_lengths_share_their_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = [], LastingMemory.take

    def counted(memory: LastingMemory, n_bytes: int, owner: str, **more: Any) -> torch.Tensor:
        taken.append(owner)
        return take(memory, n_bytes, owner, **more)

    monkeypatch.setattr(LastingMemory, "take", counted)
    monkeypatch.setattr(LayerStack, "sends_away", lambda stack, n_bytes, layer: layer < 4)
    model = outcore.hf.stream(tiny(num_hidden_layers=6).train())
    for length in (12, 11, 10, 9, 8, 7):
        model(input_ids=IDS[:, :length], labels=IDS[:, :length]).loss.backward()
    assert taken.count("hidden states") == 4
