"""Habits of Hugging Face's Trainer, TRL and peft by the command line, equal to their own on a small resident model.

`--neftune_noise_alpha`, `--use_dora`, `--lora_modules_to_save`, `--group_by_length`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outcore.cli import main
from outcore.engine.deepspeed.engine import DeepSpeedEngine
from outcore.engine.stream.engine import StreamEngine
from outcore.engine.stream.state import seed_of
from tests.train.jobs import ENGINES, fixtures, flags, metrics, same, states, weights

corpus, shared, straight, straight_by, in_the_repository = fixtures
KINDS: dict[str, Any] = {"stream": StreamEngine, "deepspeed": DeepSpeedEngine}
BOTH = ["stream", pytest.param("deepspeed", marks=pytest.mark.slow)]
LR = 1e-2


def _argv(root: Path, corpus: Path, base: Path, *extra: str) -> list[str]:
    argv = flags(root, corpus, "--model_name_or_path", str(base), "--run_name", "r", "--eval_steps", "0")
    argv += ["--precision", "fp32", "--packing", "off"]
    schedule = ["--lr_scheduler_type", "constant", "--learning_rate", str(LR), "--weight_decay", "0"]
    return ["train", *argv, *schedule, *extra]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, torch.Tensor]]]:
    """The micro-batches of every step that an engine takes."""
    steps: list[list[dict[str, torch.Tensor]]] = []
    for kind in KINDS.values():
        real = kind.train_step
        monkeypatch.setattr(
            kind, "train_step", lambda self, batches, lr, real=real: (steps.append(batches), real(self, batches, lr))[1]
        )
    return steps


def _losses(root: Path) -> list[float]:
    return [line["loss"] for line in metrics(root) if "event" not in line and "loss" in line]


def _train_resident(model: Any, steps: list[list[dict[str, torch.Tensor]]], before: Any = lambda step, m: None) -> list:
    """Plain torch: the loss of each step, clipped at 1, AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0)
    losses = []
    model.train()
    for step, batches in enumerate(steps):
        total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        loss_sum = 0.0
        for m, batch in enumerate(batches):
            before(step + 1, m)
            logits = model(batch["input_ids"], attention_mask=batch.get("attention_mask")).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            )
            (loss / total).backward()
            loss_sum += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum / total)
    return losses


def _base(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_neftune_is_transformers_own(tmp_path: Path, corpus: Path, straight: Path, seen: list) -> None:
    """The same noise drawn for the same seeds: losses of two steps equal, and the noise is seen in them."""
    from transformers.integrations.neftune import activate_neftune

    base = straight / "export/r"
    assert main(_argv(tmp_path, corpus, base, "--max_steps", "2", "--no_export", "--neftune_noise_alpha", "5")) == 0
    steps = list(seen)
    model = _base(base)
    activate_neftune(model, 5.0)
    theirs = _train_resident(model, steps, lambda step, m: torch.manual_seed(seed_of(42, step, m, 0)))
    assert _losses(tmp_path) == pytest.approx(theirs, rel=1e-4)
    assert _losses(tmp_path) != pytest.approx(_train_resident(_base(base), steps), rel=1e-3)


@pytest.mark.more
@pytest.mark.parametrize("engine", BOTH)
def test_neftune_resumes_exactly_and_not_in_evaluation(tmp_path, corpus, straight, engine):
    base = straight / "export/r"
    argv = ["--max_steps", "4", "--save_steps", "2", "--no_export", "--neftune_noise_alpha", "5", *ENGINES[engine]]
    argv += ["--eval_steps", "4"]
    assert main(_argv(tmp_path, corpus, base, *argv)) == 0
    whole = states(tmp_path / "checkpoint/r/step-00000004")
    evaluated = next(line["eval_loss"] for line in metrics(tmp_path) if "eval_loss" in line)
    at = str(tmp_path / "checkpoint/r/step-00000002")
    assert main(_argv(tmp_path, corpus, base, *argv, "--resume_from_checkpoint", at)) == 0
    assert same(whole, states(tmp_path / "checkpoint/r/step-00000004"))
    again = [line["eval_loss"] for line in metrics(tmp_path) if "eval_loss" in line]
    assert again == [evaluated]
    at = str(tmp_path / "checkpoint/r/step-00000004")
    assert main(_argv(tmp_path, corpus, base, *argv[:-2], "--eval_steps", "4", "--resume_from_checkpoint", at)) == 0
    assert [line["eval_loss"] for line in metrics(tmp_path) if "eval_loss" in line][-1] == evaluated


@pytest.mark.parametrize("engine", BOTH)
def test_dora_is_pefts(tmp_path: Path, corpus: Path, straight: Path, seen: list, engine: str) -> None:
    """Three steps: losses, adapters, lengths and the merged model."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base = straight / "export/r"
    argv = ["--max_steps", "3", "--save_steps", "1", "--save_total_limit", "9", "--lora_r", "4", "--use_dora"]
    argv += ENGINES[engine] + (["--zero_stage", "zero2"] if engine == "deepspeed" else [])
    assert main(_argv(tmp_path, corpus, base, *argv)) == 0
    trained = states(tmp_path / "checkpoint/r/step-00000003")
    assert main(["export", str(tmp_path / "checkpoint/r"), "--out", str(tmp_path / "adapter")]) == 0
    said = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert said["use_dora"] is True
    config = LoraConfig(r=4, lora_alpha=8, target_modules=said["target_modules"], use_dora=True)
    theirs = get_peft_model(_base(base), config)
    first = _first_adapters(tmp_path, corpus, base, argv)
    for name, parameter in theirs.named_parameters():
        if "lora_A" in name:
            parameter.data.copy_(first[name.removeprefix("base_model.model.").replace(".default", "")])
    assert _losses(tmp_path) == pytest.approx(_train_resident(theirs, seen[:3]), rel=1e-4)
    lengths = [name for name in trained if name.startswith("model:") and "lora_magnitude_vector" in name]
    assert len(lengths) == sum("lora_magnitude_vector" in name for name, _ in theirs.named_parameters()) > 0
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            mine = trained["model:" + name.removeprefix("base_model.model.").replace(".default", "")]
            torch.testing.assert_close(mine, parameter.detach(), rtol=2e-2, atol=2e-4, msg=name)
    loaded = PeftModel.from_pretrained(_base(base), str(tmp_path / "adapter"))
    merged = loaded.merge_and_unload().state_dict()  # type: ignore[operator]
    for name, value in weights(tmp_path / "export/r").items():
        # its base's 16-bit type
        torch.testing.assert_close(value.float(), merged[name].float(), rtol=8e-3, atol=1e-4, msg=name)


def _first_adapters(root: Path, corpus: Path, base: Path, argv: list[str]) -> dict[str, torch.Tensor]:
    """What the adapters of a run start as: those of a run of one step at almost no learning rate."""
    other = root / "first"
    argv = [*argv[2:], "--max_steps", "1", "--learning_rate", "1e-12", "--no_export"]
    assert main(_argv(other, corpus, base, *argv)) == 0
    found = states(other / "checkpoint/r/step-00000001")
    return {name.removeprefix("model:"): value for name, value in found.items() if name.startswith("model:")}


@pytest.mark.more
def test_dora_resumes_exactly_and_over_a_packed_base_starts_as_it(tmp_path, corpus, straight, seen):
    """Lengths are those of the packed weights as they are used: the first loss is that of the base in nf4."""
    base = straight / "export/r"
    argv = ["--max_steps", "2", "--save_steps", "1", "--lora_r", "4", "--quantize", "nf4", "--no_export"]
    assert main(_argv(tmp_path / "dora", corpus, base, *argv, "--use_dora")) == 0
    assert main(_argv(tmp_path / "plain", corpus, base, *argv)) == 0
    dora, plain = _losses(tmp_path / "dora"), _losses(tmp_path / "plain")
    assert dora[0] == pytest.approx(plain[0], rel=1e-5) and dora[1] != plain[1]
    whole = states(tmp_path / "dora/checkpoint/r/step-00000002")
    at = str(tmp_path / "dora/checkpoint/r/step-00000001")
    assert main(_argv(tmp_path / "dora", corpus, base, *argv, "--use_dora", "--resume_from_checkpoint", at)) == 0
    assert same(whole, states(tmp_path / "dora/checkpoint/r/step-00000002"))
    assert main(_argv(tmp_path / "dora", corpus, base, *argv, "--resume_from_checkpoint", at)) == 1


@pytest.mark.more(after=1)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("engine", BOTH)
def test_modules_trained_whole_are_pefts(tmp_path, corpus, straight, seen, engine, tied):
    """Embedding, head and a norm beside adapters: losses, weights, the merged model, and both kinds of export."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base, names = tmp_path / "base", ["embed_tokens", "lm_head", "input_layernorm"]
    model = _base(straight / "export/r")
    if model.config.tie_word_embeddings != tied:
        model = _retied(model, tied)
    model.save_pretrained(base)
    for file in (straight / "export/r").glob("tokenizer*"):
        (base / file.name).write_bytes(file.read_bytes())
    argv = ["--max_steps", "3", "--save_steps", "3", "--lora_r", "4", "--lora_modules_to_save", ",".join(names)]
    argv += ENGINES[engine]
    assert main(_argv(tmp_path, corpus, base, *argv)) == 0
    trained = states(tmp_path / "checkpoint/r/step-00000003")
    assert main(["export", str(tmp_path / "checkpoint/r"), "--out", str(tmp_path / "adapter")]) == 0
    said = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert set(said["modules_to_save"]) == set(names) and said["ensure_weight_tying"] is tied
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=said["target_modules"], modules_to_save=names, ensure_weight_tying=tied
    )
    theirs = get_peft_model(_base(base), config)
    first = _first_adapters(tmp_path, corpus, base, argv)
    for name, parameter in theirs.named_parameters():
        if "lora_A" in name:
            parameter.data.copy_(first[name.removeprefix("base_model.model.").replace(".default", "")])
    assert _losses(tmp_path) == pytest.approx(_train_resident(theirs, seen[:3]), rel=1e-4)
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            plain = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
            mine = trained["model:" + plain.replace(".default", "")]
            torch.testing.assert_close(mine, parameter.detach(), rtol=2e-2, atol=2e-4, msg=name)
    exported = weights(tmp_path / "export/r")
    loaded = PeftModel.from_pretrained(_base(base), str(tmp_path / "adapter"))
    merged = loaded.merge_and_unload().state_dict()  # type: ignore[operator]
    assert main(["export", str(tmp_path / "checkpoint/r"), "--merge", "--out", str(tmp_path / "merged")]) == 0
    ours = weights(tmp_path / "merged")
    assert ours.keys() == exported.keys()
    for name, value in exported.items():
        torch.testing.assert_close(value, merged[name], rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(value, ours[name], rtol=1e-4, atol=1e-5, msg=name)
    assert _base(tmp_path / "merged").config.tie_word_embeddings is tied
    assert not torch.equal(exported["model.embed_tokens.weight"], weights(base)["model.embed_tokens.weight"])
    if not tied:
        return
    assert main(_argv(tmp_path / "x", corpus, base, *argv, "--lora_export", "adapter")) == 0
    same_keys = set(PeftModel.from_pretrained(_base(base), str(tmp_path / "x/export/r")).state_dict())
    assert same_keys == set(PeftModel.from_pretrained(_base(base), str(tmp_path / "adapter")).state_dict())


def _retied(model: Any, tied: bool) -> Any:
    from transformers import AutoModelForCausalLM

    config = type(model.config).from_dict({**model.config.to_dict(), "tie_word_embeddings": tied})
    other = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    other.load_state_dict(model.state_dict(), strict=False)
    return other


def test_what_cannot_be_trained_whole_is_refused(tmp_path, corpus, straight, capsys):
    base = straight / "export/r"
    cases = {
        ("--lora_modules_to_save", "lm_heat"): "no module 'lm_heat' with weights",
        ("--lora_modules_to_save", "q_proj", "--lora_target_modules", "q_proj"): "would train it twice",
        ("--use_dora", "--lora_target_modules", "embed_tokens"): "is an embedding",
        ("--use_dora", "--engine", "deepspeed"): "Use --engine stream, or --zero_stage zero2",
        ("--use_dora", "--tiling", "on", "--tile_bytes", "4096", "--engine", "stream"): "leave use_dora out",
    }
    if _base(base).config.tie_word_embeddings:
        cases["--lora_modules_to_save", "lm_head"] = "Add embed_tokens as well"
    for words, told in cases.items():
        assert main(_argv(tmp_path, corpus, base, "--max_steps", "1", "--lora_r", "4", *words)) == 2
        assert told in capsys.readouterr().err, words


def _rows(folder: Path) -> Path:
    """Questions with answers of very unlike lengths."""
    lengths = np.random.default_rng(0).integers(1, 40, size=90)
    rows = [{"prompt": f"Say {n} times a:", "completion": " a" * int(n)} for n in lengths]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.more
@pytest.mark.parametrize("several", [pytest.param(False, marks=pytest.mark.slow), True], ids=["one source", "two"])
def test_rows_of_one_length_together_are_transformers_own(tmp_path, corpus, straight, seen, monkeypatch, several):
    """Their sampler on this run's random order gives the rows that this run took; resumed exactly; less padding."""
    from transformers import trainer_pt_utils

    from outcore.data.layout.permutation import Permutation
    from outcore.train.run import assemble as context

    streams: list[Any] = []
    real = context.BatchStream
    monkeypatch.setattr(context, "BatchStream", lambda *a, **kw: (streams.append(real(*a, **kw)), streams[-1])[1])
    data = _rows(tmp_path)
    sources = [f"{data}:0.5", f"{data}:2"] if several else [str(data)]

    def argv(root: Path, *extra: str) -> list[str]:
        words = _argv(root, data, straight / "export/r", "--max_steps", "8", "--save_steps", "4", "--no_export")
        at = words.index("--dataset")
        words[at : at + 2] = [word for source in sources for word in ("--dataset", source)]
        return [*words, "--eval_fraction", "0", "--seq_length", "64", *extra]

    assert main(argv(tmp_path / "g", "--group_by_length")) == 0
    grouped = [batch for batches in seen for batch in batches]
    mine = [length for batch in grouped for length in _lengths(batch)]
    lengths = streams[0].dataset.row_lengths.tolist()
    assert lengths == [sum(map(len, streams[0].dataset.documents_of(row))) for row in range(len(lengths))]
    order = torch.from_numpy(Permutation(len(lengths), 42, 0)(np.arange(len(lengths))))
    monkeypatch.setattr(trainer_pt_utils.torch, "randperm", lambda n, generator=None: order)
    theirs = trainer_pt_utils.get_length_grouped_indices(lengths, 4)
    assert mine == [lengths[row] for row in theirs[: len(mine)]] and len(mine) == 32
    seen.clear()
    assert main(argv(tmp_path / "p", "--packing", "off")) == 0
    plain = [batch for batches in seen for batch in batches]
    assert _padding(grouped) < 0.5 * _padding(plain)
    whole = states(tmp_path / "g/checkpoint/r/step-00000008")
    resume = ["--resume_from_checkpoint", str(tmp_path / "g/checkpoint/r/step-00000004")]
    assert main(argv(tmp_path / "g", "--group_by_length", *resume)) == 0
    assert same(whole, states(tmp_path / "g/checkpoint/r/step-00000008"))
    assert main(argv(tmp_path / "g", *resume)) == 2, "another order is another run"


def _lengths(batch: dict[str, torch.Tensor]) -> list[int]:
    """Tokens of each row, padding not counted."""
    mask = batch.get("attention_mask")
    return (torch.ones_like(batch["input_ids"]) if mask is None else mask).sum(1).tolist()


def _padding(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(batch["input_ids"].numel() - sum(_lengths(batch)) for batch in batches)


def test_packed_rows_are_not_grouped(tmp_path, corpus, straight, capsys):
    argv = _argv(tmp_path, corpus, straight / "export/r", "--max_steps", "1", "--group_by_length", "--packing", "on")
    assert main(argv) == 2
    assert "packed rows are all of one length. Use --packing off" in capsys.readouterr().err
