"""What only a GPU shows of the model room: same initial weights there, packing in 16 bits, memory of chunked logits."""

import pytest
import torch

from outcore.model import ModelSettings, load_model
from outcore.model.loss import TokenLoss

pytestmark = pytest.mark.gpu

SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512}


def load(device: str, **fields):
    settings = ModelSettings(preset="tiny", seq_length=1024, config_overrides=SMALL, **fields)
    return load_model(settings, device=device)


def test_initial_weights_are_those_of_the_cpu():
    on_cpu, on_gpu = load("cpu").model, load("cuda").model
    for (name, a), (_, b) in zip(on_cpu.named_parameters(), on_gpu.named_parameters(), strict=True):
        assert b.is_cuda and torch.equal(a, b.cpu()), name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_are_isolated_in_16_bits(attention):
    loaded = load("cuda", attn_implementation=attention)
    ids = torch.randint(2, 4096, (2, 96), device="cuda")
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([30, 1, 65], [48, 48])]).cuda()
    with torch.no_grad():
        packed = loaded.model(input_ids=ids, position_ids=positions, use_cache=False).logits
        changed = ids.clone()
        changed[:, :30] = 7
        again = loaded.model(input_ids=changed, position_ids=positions, use_cache=False).logits
    assert torch.equal(packed[0, 30:], again[0, 30:]) and torch.equal(packed[1, 48:], again[1, 48:])
    assert not torch.equal(packed[:, :30], again[:, :30])


def test_chunked_logits_need_a_fraction_of_the_memory():
    loaded = load("cuda", vocab_size=128256)
    ids = torch.randint(2, 128256, (4, 1024))
    batch = {"input_ids": ids, "labels": ids.clone()}
    peaks, losses = [], []
    for loss in (loaded.token_loss(num_chunks=16), TokenLoss(loaded.model, chunked=False, num_chunks=1)):
        loaded.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        objective = loss(loaded.model, batch).objective(4 * 1023)
        objective.backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before_bytes)
        losses.append(float(objective.detach()))
    assert abs(losses[0] - losses[1]) < 1e-3 * losses[1]
    assert peaks[0] < 0.4 * peaks[1], peaks


def test_dropout_is_replayed_on_the_gpu():
    settings = ModelSettings(
        preset="gpt2", precision="fp32", seq_length=64,
        config_overrides={"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512}, gradient_checkpointing=True,
    )  # fmt: skip
    ids = torch.randint(2, 512, (2, 64))
    batch = {"input_ids": ids, "labels": ids}
    grads = []
    for checkpointed in (True, False):
        loaded = load_model(settings, device="cuda")
        if not checkpointed:
            model = loaded.model  # transformers before 5.20 has the older name only
            getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
        torch.cuda.manual_seed(5)
        loaded.token_loss(num_chunks=4)(loaded.model, batch).objective(126).backward()
        grads.append([p.grad.clone() for p in loaded.model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
