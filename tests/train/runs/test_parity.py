"""Runs beside Hugging Face's Trainer, TRL and peft: the same rows in the same order give the same rates, losses, norms
and weights. On a tiny Qwen2, which has norms and biases, in fp32 on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from outcore.cli import main
from outcore.config import understand
from outcore.engine.deepspeed.engine import DeepSpeedEngine
from outcore.engine.stream.engine import StreamEngine
from outcore.model.facts import undecayed
from outcore.train.configure import parse_config
from outcore.train.configure.rooms import schedule_of
from tests.train.jobs import REPOSITORY, metrics, states, try_once

Steps = list[list[dict[str, torch.Tensor]]]
TEXT = "the quick brown fox jumps over a lazy dog and runs away from two bears that sleep in their warm cave"
WORDS = TEXT.split()
QUIET = "--sample_steps 0 --eval_strategy no --eval_fraction 0 --report_to none --learning_rate 1e-2"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEPS = 6


def sentence(seed: int, words: int) -> str:
    drawn = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(WORDS[at] for at in drawn)


TEXTS = [{"text": sentence(seed, 5 + seed % 23)} for seed in range(60)]
ANSWERS = [{"prompt": sentence(seed, 8), "completion": " " + sentence(99 + seed, 2 + seed % 9)} for seed in range(60)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"].strip()},
            {"role": "user", "content": sentence(seed, 3)},
            {"role": "assistant", "content": sentence(7 + seed, 4)},
        ]
    }
    for seed, row in enumerate(ANSWERS)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, of which norms and biases are not as they are made, and its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("base")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    of_words = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator([row["text"] for row in TEXTS], of_words)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2 if "norm" in name else 0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The micro-batches of every step that our engines take."""
    monkeypatch.chdir(REPOSITORY)
    try_once(monkeypatch)
    taken: Steps = []
    kinds: tuple[Any, ...] = (StreamEngine, DeepSpeedEngine)
    for kind in kinds:
        real = kind.train_step
        monkeypatch.setattr(
            kind, "train_step", lambda self, batches, lr, real=real: (taken.append(batches), real(self, batches, lr))[1]
        )
    return taken


@dataclass(frozen=True)
class Case:
    """Our flags, and what means the same to the others."""

    ours: str
    theirs: dict[str, Any] = field(default_factory=dict)
    """Arguments of `TrainingArguments` or `SFTConfig`."""
    lora: dict[str, Any] | None = None
    """Arguments of peft's `LoraConfig`."""
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    """Optimizer that is given to their trainer; None: its own."""
    rows: int = 2
    accumulation: int = 2
    is_exact_loss: bool = True

    def arguments(self, folder: Path) -> dict[str, Any]:
        usual = {
            "learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_grad_norm": 1.0, "weight_decay": 0.01,
            "per_device_train_batch_size": self.rows, "gradient_accumulation_steps": self.accumulation,
            "max_steps": STEPS, "warmup_steps": 0, "optim": "adamw_torch",
        }  # fmt: skip
        fixed = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "logging_steps": 1, "save_strategy": "no"}
        return {**usual, **fixed, "disable_tqdm": True, "bf16": False, **self.theirs}


def one_group(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)


WARM = "--warmup_steps 3"
DECAY = {"weight_decay": 0.3}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
ALL = "--lora_r 4 --lora_target_modules all-linear --warmup_steps 1"
ONE = {"warmup_steps": 1}
CASES = {
    "decay of all but norms and biases": Case("--weight_decay 0.3", DECAY),
    "linear, warm": Case(WARM, {"warmup_steps": 3}),
    "decay of all": Case("--weight_decay 0.3 --decay_all", DECAY, optimizer=one_group),
    "LoRA": Case(ALL, ONE, LORA),
    "as it comes": Case(""),
    "cosine, warm": Case(f"--lr_scheduler_type cosine {WARM}", {"lr_scheduler_type": "cosine", "warmup_steps": 3}),
    "no accumulation": Case("", rows=4, accumulation=1),
    "accumulation of five": Case("", rows=1, accumulation=5),
    "clipped hard": Case("--max_grad_norm 0.05", {"max_grad_norm": 0.05}),
    "not clipped": Case("--max_grad_norm 0", {"max_grad_norm": 0.0}),
    "betas and epsilon": Case(
        "--adam_beta1 0.8 --adam_beta2 0.95 --adam_epsilon 1e-6",
        {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    ),
    "label smoothing": Case(
        "--label_smoothing_factor 0.1", {"label_smoothing_factor": 0.1}, rows=4, accumulation=1
    ),
    "recomputed activations": Case("--gradient_checkpointing true", {"gradient_checkpointing": True}),
    "kept activations": Case("--gradient_checkpointing false", {}),
    "LoRA of two modules": Case(
        "--lora_r 8 --lora_alpha 8 --lora_target_modules q_proj,v_proj --warmup_steps 1",
        ONE,
        {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    ),
    "LoRA, rank-stabilized": Case(f"{ALL} --use_rslora", ONE, {**LORA, "use_rslora": True}),
    "DoRA": Case(f"{ALL} --use_dora", ONE, {**LORA, "use_dora": True}),
    "LoRA with decay": Case(f"{ALL} --weight_decay 0.3", {**ONE, **DECAY}, LORA),
    "LoRA and a norm": Case(
        f"{ALL} --lora_modules_to_save input_layernorm --weight_decay 0.3",
        {**ONE, **DECAY},
        {**LORA, "modules_to_save": ["input_layernorm"]},
    ),
    "DeepSpeed, decay": Case("--engine deepspeed --weight_decay 0.3", DECAY),
    "DeepSpeed without offload, decay": Case("--engine deepspeed --zero_stage none --weight_decay 0.3", DECAY),
}  # fmt: skip
"""The cases that differ most come first: the others run where all tests do."""
RATES = {
    "a share of the run to warm up": Case("--warmup_ratio 0.4", {"warmup_steps": 3}),
    "cosine": Case("--lr_scheduler_type cosine --warmup_steps 0", {"lr_scheduler_type": "cosine"}),
    "constant": Case("--lr_scheduler_type constant", {"lr_scheduler_type": "constant"}),
    "constant, warm": Case(
        f"--lr_scheduler_type constant_with_warmup {WARM}",
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
    ),
    "cosine to a tenth": Case(
        "--lr_scheduler_type cosine_with_min_lr --warmup_steps 2",
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 2},
    ),
    "warm, stable, falling": Case(
        "--lr_scheduler_type wsd --warmup_steps 2 --lr_decay_ratio 0.5",
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 3, "decay_type": "linear"},
            "warmup_steps": 2,
        },
    ),
}
"""More schedules, of which the rates alone are compared."""


@pytest.mark.more(after=4)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_runs_are_those_of_hugging_faces_trainer(tmp_path: Path, base: Path, steps: Steps, case: Case) -> None:
    from transformers import Trainer, TrainingArguments

    train(tmp_path, base, TEXTS, case)
    model = theirs_of(tmp_path, base, case)
    rows = [row for batches in steps for batch in batches for row in rows_of(batch)]
    trainer = in_order(Trainer)(
        model=model,
        args=TrainingArguments(**case.arguments(tmp_path / "hf")),
        train_dataset=rows,
        data_collator=lambda found: {name: torch.stack([row[name] for row in found]) for name in found[0]},
        **({"optimizers": (case.optimizer(model), None)} if case.optimizer else {}),
    )
    trainer.train()
    compare(tmp_path, trainer, model)


@pytest.mark.parametrize("case", RATES.values(), ids=list(RATES))
def test_rates_are_those_of_hugging_faces_trainer(tmp_path: Path, case: Case) -> None:
    from transformers import Trainer, TrainingArguments

    ours = schedule_of(parse_config(case.ours.split()), understand({}), 1e-2, STEPS)
    trainer = Trainer(torch.nn.Linear(1, 1), TrainingArguments(**case.arguments(tmp_path)))
    trainer.create_optimizer_and_scheduler(STEPS)
    for step in range(STEPS):
        assert ours.lr(step) == pytest.approx(trainer.lr_scheduler.get_last_lr()[0], rel=1e-9, abs=1e-12)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()


@pytest.mark.more(after=2)
@pytest.mark.parametrize(("rows", "asked", "lora"), [
    (ANSWERS, {"completion_only_loss": True}, None), (CHATS, {"assistant_only_loss": True}, LORA), (TEXTS, {}, None),
], ids=["completions", "chats, LoRA", "texts"])  # fmt: skip
def test_runs_are_those_of_trl(
    tmp_path: Path, base: Path, steps: Steps, rows: list[dict[str, Any]], asked: dict[str, Any], lora: dict | None
) -> None:
    """Which tokens bear loss, too: TRL reads the same rows by itself."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    case = Case(ALL if lora else "", {**(ONE if lora else {}), **asked, "max_length": 128, "packing": False}, lora)
    train(tmp_path, base, rows, case)
    tokenizer, model = AutoTokenizer.from_pretrained(base), theirs_of(tmp_path, base, case)
    config = SFTConfig(**case.arguments(tmp_path / "trl"))
    trainer = in_order(SFTTrainer)(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    of_tokens = {tuple(row["input_ids"]): row for row in trainer.train_dataset}
    taken = [of_tokens[tokens] for batches in steps for batch in batches for tokens in tokens_of(batch)]
    trainer.train_dataset = Dataset.from_list(taken)
    trainer.train()
    compare(tmp_path, trainer, model)


def test_epochs_that_do_not_divide_are_said(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trainer: three steps an epoch, of 10, 10 and 3 rows."""
    case = Case("--max_steps -1 --num_train_epochs 3 --save_strategy no", accumulation=5)
    train(tmp_path, base, TEXTS[:23], case)
    said = capsys.readouterr().out
    assert "epochs: 3 x 23 rows are 7 steps of 10" in said and "smaller one, 9 steps in all" in said
    assert "The whole run: 7 steps, " in said and "random" not in said
    assert len([line for line in metrics(tmp_path) if "event" not in line]) == 7


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma3_text", "bloom", "mamba", "phi", "olmo2", "t5"])
def test_what_decays_is_what_trainer_decays(family: str) -> None:
    """By names, and norms by their type: gpt2 and bloom call them ln_1 and ln_f."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, Trainer

    config = AutoConfig.for_model(family)
    with torch.device("meta"):
        model = (AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM).from_config(config)
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # pyright: ignore[reportArgumentType]
    assert undecayed(model) == {name for name, _ in model.named_parameters(remove_duplicate=False)} - decayed
    assert undecayed(model)


def train(root: Path, base: Path, rows: list[dict[str, Any]], case: Case) -> None:
    """Our run, of which the last step is saved, and with adapters the first, too."""
    data = root / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    folders = [f"--{name}_dir={root / name}" for name in ("checkpoint", "log", "export")]
    argv = ["--dataset", str(data), *folders, f"--data_cache_dir={root / 'cache'}"]
    argv += ["--model_name_or_path", str(base)]
    argv += f"--run_name r --seq_length 128 --packing off --precision fp32 --max_steps {STEPS} --no_export".split()
    argv += f"--micro_batch_size {case.rows} --gradient_accumulation_steps {case.accumulation}".split()
    argv += QUIET.split()
    argv += ["--save_steps", "1" if case.lora else "0", "--save_total_limit", "9"]
    assert main(["train", *argv, *case.ours.split()]) == 0


def theirs_of(root: Path, base: Path, case: Case) -> Any:
    """Their model, with our adapters as they are after a first step at a rate of 0."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if case.lora is None:
        return model
    adapted = get_peft_model(model, LoraConfig(lora_dropout=0.0, task_type="CAUSAL_LM", **case.lora))
    first = states(root / "checkpoint/r/step-00000001")
    for name, parameter in adapted.named_parameters():
        if "lora_A" in name:
            parameter.data.copy_(first[f"model:{plain(name)}"])
    return adapted


def plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".modules_to_save", "").replace(".default", "")


def in_order(kind: Any) -> Any:
    """The trainer, with the rows in the order in which they are."""

    class InOrder(kind):
        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    return InOrder


def rows_of(batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    for at in range(len(batch["input_ids"])):
        yield {name: batch[name][at] for name in ("input_ids", "labels", "attention_mask") if name in batch}


def tokens_of(batch: dict[str, torch.Tensor]) -> Iterator[tuple[int, ...]]:
    for row in rows_of(batch):
        mask = row.get("attention_mask", torch.ones_like(row["input_ids"])).bool()
        yield tuple(row["input_ids"][mask].tolist())


def compare(root: Path, trainer: Any, model: Any) -> None:
    """Rates, losses and norms of every step, and the weights after the last."""
    ours = [line for line in metrics(root) if "event" not in line]
    theirs = [line for line in trainer.state.log_history if "loss" in line]
    assert len(ours) == len(theirs) == STEPS
    for mine, their in zip(ours, theirs, strict=True):
        assert mine["lr"] == pytest.approx(their["learning_rate"], rel=1e-6, abs=1e-12)
        assert mine["loss"] == pytest.approx(their["loss"], rel=2e-6)
        assert mine["grad_norm"] == pytest.approx(their["grad_norm"], rel=1e-3)
    last = states(root / f"checkpoint/r/step-{STEPS:08d}")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mine = last[f"model:{plain(name)}"]
            torch.testing.assert_close(mine, parameter.detach(), rtol=1e-3, atol=1e-3, msg=name)
