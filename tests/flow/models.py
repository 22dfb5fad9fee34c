"""Tiny models and batches for the tests of the streaming engine."""

import pytest
import torch
import transformers

from outcore.common.quantities import MIB
from outcore.engine.stream.settings import StreamSettings
from outcore.model import LoadedModel
from outcore.model.facts import model_class_of, model_facts
from outcore.model.trial import VOCAB, check_abilities, shrink_config

TINY_SETTINGS = StreamSettings(
    staging_bytes=2 * MIB, slot_bytes=64 * 1024, num_slots=2, optimizer_threads=1, optimizer_backend="torch",
    chunk_numel=1 << 14, logits_chunk_bytes=4 * 128 * 16, seed=5,
)  # fmt: skip
"""Of an engine for a tiny model, all in RAM, with several chunks and slots of everything."""

EAGER_ONLY = ("gemma2", "gpt_oss", "bloom", "openai-gpt")
FAMILIES = [
    *("llama", "gemma2", "gpt2", "mixtral", "qwen2", "qwen3", "mistral", "gemma3_text", "phi", "gpt_neox"),
    *("qwen3_moe", "granite", "cohere", "olmo2", "opt", "bloom"),
]


def needs(model_type: str):
    """A mark for a case of a model that came with a later transformers than the oldest that is supported."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return pytest.mark.skipif(model_type not in CONFIG_MAPPING, reason=f"this transformers has no {model_type}")


def tiny_loaded(model_type: str, seed: int = 0, dtype=torch.float32, attention: str | None = None, **fields):
    config = shrink_config(transformers.AutoConfig.for_model(model_type))
    for name, value in fields.items():
        setattr(config, name, value)
    return tiny_of(config, seed, dtype, attention or ("eager" if model_type in EAGER_ONLY else "sdpa"))


def tiny_of(config, seed: int = 0, dtype=torch.float32, attention: str = "sdpa"):
    """A model with this (shrunken) config, its weights drawn by `seed`."""
    torch.manual_seed(seed)
    model = model_class_of(config)._from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 1.0 / parameter.shape[-1] ** 0.5)
    model.config.use_cache = False
    abilities = check_abilities(config, attention)
    return LoadedModel(model.train(), config, model_facts(model), abilities, f"tiny {config.model_type}")


def set_dropout(model, p: float) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        for name in ("attention_dropout", "attn_dropout", "dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0 if name == "layerdrop" else p)


def plain_batch(rows: int = 2, length: int = 20, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    labels[0, length // 2] = -100
    return {"input_ids": ids, "labels": labels}


def padded_batch(rows: int = 2, length: int = 20, seed: int = 0):
    batch = plain_batch(rows, length, seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -5:] = 0
    batch["labels"][0, -5:] = -100
    return {**batch, "attention_mask": mask}


def packed_batch(rows: int = 2, length: int = 20, seed: int = 0):
    batch = plain_batch(rows, length, seed)
    split = length // 3 + 1
    positions = torch.cat([torch.arange(split), torch.arange(length - split)])
    batch["labels"][:, split] = -100
    return {**batch, "position_ids": positions.expand(rows, -1).contiguous()}


def plain_gradients(loaded, batches, dtype=torch.float32):
    """(mean loss, mean auxiliary loss, gradients by name) by autograd over the whole model."""
    loss = loaded.token_loss()
    total = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    ce = aux = 0.0
    loaded.model.zero_grad(set_to_none=True)
    for batch in batches:
        result = loss(loaded.model, batch)
        result.objective(total).backward()
        ce += float(result.loss_sum.detach()) / total
        aux += float(result.aux_loss.detach() * result.n_tokens) / total if result.aux_loss is not None else 0.0
    grads = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad.clone())
        for name, p in loaded.model.named_parameters()
        if p.requires_grad
    }
    loaded.model.zero_grad(set_to_none=True)
    return ce, aux, grads


def assert_same_grads(mine, expected, rtol: float = 1e-4) -> None:
    assert mine.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name in mine:
        torch.testing.assert_close(
            mine[name].view(expected[name].shape), expected[name], rtol=rtol, atol=1e-5 * scale,
            msg=lambda m, name=name: f"{name}: {m}",
        )  # fmt: skip
