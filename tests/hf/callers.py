"""Trainers that know nothing of outcore, on tiny random models: what each leaves of a model, plain and streamed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

from outcore.model.trial import shrink_config

FAMILIES = ("llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "phi", "olmo2", "qwen2")
"""Kinds of layers that differ: sliding windows, experts, biases, norms before and behind, Conv1D."""
TARGETS = {"gpt2": ["c_attn", "c_fc"], "phi": ["q_proj", "fc1"]}
ROWS = 24


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few merges."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<unk>", "<pad>", "<eos>", "<bos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(["hello world this is a test of numbers 1 2 3 4 5"] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>", unk_token="<unk>"
    )


def tiny(family: str = "llama", *, labels: int = 0, lora: bool = False, dropout: float = 0.0, **fields: Any) -> Any:
    """A random model, the same for the same arguments; with `labels` one that classifies."""
    config = shrink_config(transformers.AutoConfig.for_model(family))
    config.vocab_size = len(tokenizer())
    for name, value in fields.items():
        setattr(config, name, value)
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 1, 2, 3
    torch.manual_seed(0)
    if labels:
        config.num_labels = labels
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return with_lora(model, family, dropout) if lora else model


def with_lora(model: Any, family: str = "llama", dropout: float = 0.0) -> Any:
    """With adapters whose second matrices are not zero."""
    torch.manual_seed(1)
    kind = "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"
    targets = TARGETS.get(family, ["q_proj", "o_proj"])
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type=kind, lora_dropout=dropout))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def text() -> Dataset:
    return Dataset.from_list([{"text": f"hello world {i} this is a test"} for i in range(ROWS)])


def pairs() -> Dataset:
    rows = [{"prompt": f"hello {i}", "chosen": f" world {i} 1 2", "rejected": f" test {i} 5"} for i in range(ROWS)]
    return Dataset.from_list(rows)


def judged() -> Dataset:
    rows = [{"prompt": f"hello {i}", "completion": f" world {i}", "label": i % 2 == 0} for i in range(ROWS)]
    return Dataset.from_list(rows)


def tokens(*, classes: int = 0) -> Dataset:
    """Encoded rows, with labels for each token or a class."""
    rows = []
    for i in range(ROWS):
        row = dict(tokenizer()(f"hello world {i} this is a test"[: 12 + i], padding="max_length", max_length=24))
        labels = [token if kept else -100 for token, kept in zip(row["input_ids"], row["attention_mask"], strict=True)]
        rows.append({**row, "labels": i % classes if classes else labels})
    return Dataset.from_list(rows)


def arguments(kind: type, folder: Path, steps: int, **more: Any) -> Any:
    """Two micro-batches of four rows a step, clipped; the rest is the trainer's own default."""
    usual: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 4, "use_cpu": True, "seed": 0,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "report_to": [], "save_strategy": "no",
        "logging_steps": 1, "bf16": False, "disable_tqdm": True, "max_grad_norm": 0.5, "warmup_steps": 1,
    }  # fmt: skip
    return kind(**usual | more)


def _trl(name: str, data: Callable[[], Dataset], reads: Any = None, **more: Any) -> Callable[..., Any]:
    def make(model: Any, folder: Path, steps: int, reference: Any = None, peft: Any = None, **args: Any) -> Any:
        import trl

        trainer = getattr(trl, f"{name}Trainer", None) or getattr(
            __import__(f"trl.experimental.{name.lower()}", fromlist=["x"]), f"{name}Trainer"
        )
        kind = getattr(__import__(trainer.__module__.rpartition(".")[0], fromlist=["x"]), f"{name}Config")
        given = {} if reference is None else {"ref_model": reference}
        return trainer(
            model,
            args=arguments(kind, folder, steps, **more | args),
            train_dataset=data(),
            processing_class=reads or tokenizer(),
            peft_config=peft,
            **given,
        )

    return make


def about_pictures(processor: Any) -> Callable[..., Any]:
    """TRL's DPO on pairs of answers about one picture each."""
    said = lambda role, text: [{"role": role, "content": text}]  # noqa: E731
    rows = [
        {"prompt": said("user", f"hello {color}"), "chosen": said("assistant", f"test {color}"),
         "rejected": said("assistant", "world"), "images": [Image.new("RGB", (30, 20 + 5 * at), color)]}
        for at, color in enumerate(("red", "blue", "green", "white", "black", "gray", "pink", "brown"))
    ]  # fmt: skip
    return _trl("DPO", lambda: Dataset.from_list(rows), processor)


def _transformers(data: Callable[[], Dataset]) -> Callable[..., Any]:
    def make(model: Any, folder: Path, steps: int, **args: Any) -> Any:
        made = arguments(transformers.TrainingArguments, folder, steps, **args)
        return transformers.Trainer(model, args=made, train_dataset=data())

    return make


TRAINERS: dict[str, Callable[..., Any]] = {
    "sft": _trl("SFT", text, max_length=32),
    "dpo": _trl("DPO", pairs, max_length=32),
    "kto": _trl("KTO", judged, max_length=32),
    "orpo": _trl("ORPO", pairs, max_length=32),
    "reward": _trl("Reward", pairs, max_length=32),
    "classify": _transformers(lambda: tokens(classes=3)),
    "trainer": _transformers(tokens),
}
LABELS = {"reward": 1, "classify": 3}
WITH_REFERENCE = ("dpo", "kto")


def trained(
    which: str,
    family: str,
    folder: Path,
    *,
    lora: bool = False,
    steps: int = 3,
    prepare: Callable[[Any], Any] = lambda model: model,
    dropout: float = 0.0,
    **args: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, weights by name) after some steps on the model that `prepare` made of the plain one."""
    model = prepare(tiny(family, labels=LABELS.get(which, 0), lora=lora, dropout=dropout))
    if which in WITH_REFERENCE and not lora:
        args["reference"] = tiny(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = TRAINERS[which](model, folder, steps, **args)
        torch.manual_seed(7)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = trainer.model.state_dict().items()
    return losses, {name: tensor.clone() for name, tensor in weights if type(tensor) is torch.Tensor}


def assert_same(plain: Any, streamed: Any) -> None:
    """Same losses, same names, same bits; and something was learned."""
    (losses, weights), (losses_too, weights_too) = plain, streamed
    assert losses == losses_too and len(set(losses)) > 1
    assert list(weights) == list(weights_too)
    wrong = [name for name, tensor in weights.items() if not torch.equal(tensor, weights_too[name])]
    assert not wrong, wrong
