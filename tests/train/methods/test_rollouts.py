"""Methods that learn from the model's own answers: rollouts by our engine, losses, resume."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import outcore.hf
from outcore.cli import main
from outcore.common.quantities import GIB
from outcore.infer import Sampling, Speech
from outcore.infer.opening import paged_layers
from outcore.infer.rollouts import group_pages, groups_of_answers, streamed_engine
from outcore.model import ModelSettings, load_model
from outcore.monitor import read_metrics
from outcore.sizing.streaming import ROLLOUT_PASS_TOKENS, token_bytes
from outcore.staging import UploadLane
from tests.hf.callers import tiny, tokenizer
from tests.train.methods.test_foreign_trainers import TURNS

pytestmark = pytest.mark.usefixtures("one_thread")
JUDGES = """
import os, time
def length(completions, **_):
    return [float(len(text)) for text in completions]
def even(completions, want, **_):
    return [float(text.count("e")) + len(want[0]) for text in completions]
def equal(completions, **_):
    return [0.5 for _ in completions]
def bad(completions, number, **_):
    time.sleep(0)
    if number[0] % 3:
        return [float(len(text)) for text in completions]
    KIND
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    write_files()
    yield


def write_files() -> None:
    """A model, prompts and judges, here."""
    tiny().save_pretrained("model")
    tokenizer().save_pretrained("model")
    rows = [{"prompt": f"hello {i}", "want": "world", "number": i + 1} for i in range(24)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("judges.py").write_text(JUDGES)


def command(*more: str, judge: str = "length", steps: int = 3) -> list[str]:
    usual = ["--dataset", "rows.jsonl", "--reward_function", f"judges.py:{judge}", "--num_generations", "4"]
    usual += ["--seq_length", "32", "--max_completion_length", "8", "--max_steps", str(steps), "--save_steps", "1"]
    usual += ["--warmup_steps", "0", "--learning_rate", "1e-2", "--run_name", "r", "--report_to", "none"]
    return ["train", "model", "--method", "grpo", *usual, *more]


def steps_of(name: str = "r") -> list[dict[str, Any]]:
    timed = ("step_s", "step_time", "tokens")
    return [
        {k: v for k, v in step.items() if k not in timed} for step in read_metrics(f"logs/{name}/metrics.jsonl").steps
    ]


def test_answers_are_the_trained_models_own() -> None:
    """Over its weights where they lie: greedy tokens are `generate`'s, before and after a change in place, a prompt is
    read once for all its answers, and the model is as it was."""
    loaded = load_model(ModelSettings(model_name_or_path="model", precision="fp32", seq_length=64))
    paged, model = paged_layers(loaded), loaded.model.train()
    outcore.hf.stream(model)
    prompts = [list(range(5, 5 + n)) for n in (40, 21)]
    speech = Speech(tokenizer(), frozenset({2}), model.config.vocab_size, 64, scores=False)
    sampling = Sampling(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)
    before = model.config._attn_implementation
    places = dict[str, int]()
    for _ in range(2):
        with streamed_engine(model, paged, speech, sum(group_pages(len(ids), 4, 9) for ids in prompts)) as engine:
            groups = groups_of_answers(engine, [(str(i), ids) for i, ids in enumerate(prompts)], 4, sampling)
            assert engine.counts.prompt_tokens == sum(len(ids) + 3 * (len(ids) % 16) for ids in prompts)
            cache = engine.scheduler.cache
            assert cache.size_bytes > 0
        assert not cache.size_bytes, "keys and values are given back"
        assert model.config._attn_implementation == before and model.training
        now = {name: p.data_ptr() for name, p in model.named_parameters()}
        assert places in ({}, now), "no other copy"
        places = now
        for ids, group in zip(prompts, groups, strict=True):
            said = model.eval().generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False, eos_token_id=None)
            assert [[chosen.token for chosen in answer.tokens] for answer in group] == [
                said[0, len(ids) :].tolist()
            ] * 4
            logprobs = model(said).logits.detach().float().log_softmax(-1)[0]
            for at, chosen in enumerate(group[0].tokens):
                assert chosen.logprob == pytest.approx(float(logprobs[len(ids) - 1 + at, chosen.token]), abs=1e-5)
        with torch.no_grad():
            for p in model.train().parameters():
                p.mul_(1.5)


def test_a_rollout_that_could_not_begin_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept our attention, which then held keys and values, and was no longer trained."""
    from transformers import AttentionInterface

    loaded = load_model(ModelSettings(model_name_or_path="model", precision="fp32", seq_length=64))
    paged, model = paged_layers(loaded), loaded.model.train()
    outcore.hf.stream(model)
    before, known = model.config._attn_implementation, set(AttentionInterface._global_mapping)
    speech = Speech(tokenizer(), frozenset({2}), model.config.vocab_size, 64, scores=False)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("outcore.infer.passes.streamed.SmallCopies", full)
    with pytest.raises(torch.OutOfMemoryError), streamed_engine(model, paged, speech, 9):
        pass
    assert model.config._attn_implementation == before and model.training
    assert set(AttentionInterface._global_mapping) == known


def rolled_out(layers: int | None, crossed: list[str]) -> list[Any]:
    """Tokens of two rollouts, before and after a change of the weights, of a model whose device has room for so many
    layers (None: nobody limits it). `crossed`: names of layers that were sent up."""
    loaded = load_model(ModelSettings(model_name_or_path="model", precision="fp32", seq_length=64))
    paged, model = paged_layers(loaded), loaded.model
    prompts = [(str(n), list(range(5, 5 + n))) for n in (40, 21)]
    pages = sum(group_pages(len(ids), 4, 9) for _, ids in prompts)
    first = paged.layers[0]
    features = sum(m.in_features + m.out_features for m in first.modules() if isinstance(m, torch.nn.Linear))
    computed = ROLLOUT_PASS_TOKENS * token_bytes(features, model.config.hidden_size, 4)
    of_layer, whole = (sum(p.nbytes for p in module.parameters()) for module in (first, model))
    room = (
        whole + computed + pages * 16 * paged.token_bytes(torch.float32)
    )  # two layers' buffers in place of two layers
    outcore.hf.stream(model, vram_gib=None if layers is None else (room + (layers + 0.5) * of_layer) / GIB)
    speech = Speech(tokenizer(), frozenset({2}), model.config.vocab_size, 64, scores=False)
    found, has_home = list[Any](), layers is None and not torch.cuda.is_available()
    for _ in range(2):
        crossed.clear()
        with streamed_engine(model, paged, speech, pages) as engine:
            groups = groups_of_answers(engine, prompts, 4, Sampling(max_tokens=9, ignore_eos=True, logprobs=0))
            passes = engine.counts.passes
        for at in range(2):
            times = not has_home if layers is None or at < layers else passes
            assert crossed.count(f"model.layers.{at}") == times
        found.append([[answer.tokens for answer in group] for group in groups])
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
    return found


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of parts that lanes sent up from RAM."""
    names, ours = list[str](), UploadLane.submit_host

    def watched(self: UploadLane, *args: Any, label: str = "", **more: Any) -> Any:
        names.append(label)
        return ours(self, *args, label=label, **more)

    monkeypatch.setattr(UploadLane, "submit_host", watched)
    return names


def test_layers_that_stay_cross_once_and_change_no_bit(only_own_models: None, crossed: list[str]) -> None:
    """As many as there is room for, once for all passes of a rollout; a CPU without a limit has them at home."""
    whole = rolled_out(2, crossed)
    assert whole[0] != whole[1]
    assert all(rolled_out(layers, crossed) == whole for layers in (1, 0, None))


@pytest.mark.gpu
def test_graphs_change_no_bit(only_own_models: None, crossed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    replayed, ours = list[Any](), torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replayed.append(graph) or ours(graph))
    whole, num_replayed = rolled_out(None, crossed), len(replayed)
    assert num_replayed > 8 and rolled_out(0, crossed) == whole and len(replayed) == num_replayed


@pytest.mark.more(after=2)
@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("grpo", ["--lora_r", "4", "--beta", "0.1"]),
        ("grpo", []),
        ("gspo", []),
        ("rloo", ["--lora_r", "4", "--beta", "0.1"]),
        ("rloo", []),
        ("grpo", ["--lora_r", "4", "--quantize", "nf4", "--lora_export", "adapter"]),
    ],
)
def test_a_run_tells_what_rl_users_know(method: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("--method", method, *flags, judge="even")) == 0
    steps = steps_of()
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["reward"] >= 5 and step["completions/mean_length"] <= 8 and step["grad_norm"] > 0
        assert 0 <= step["completions/clipped_ratio"] <= 1 and step["entropy"] > 1
        assert step["clip_ratio/region_mean"] == 0, "one update a batch: nothing leaves the trust region"
        assert 0 <= step["mismatch"] <= step["mismatch_max"] < 1e-4, "both log-probabilities are of the same weights"
        assert ("kl" in step) == ("--beta" in flags)
    said = capsys.readouterr().err
    for word in ("reward", "entropy", "clipped", "length", "truncated", "mismatch", *["KL"] * ("--beta" in flags)):
        assert f"| {word} " in said, said


def test_it_learns_what_is_rewarded(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--batch_size", "4", "--grad_accum", "4", "--lr_scheduler_type", "constant", "--learning_rate", "3e-2"]
    assert main(command(*flags, judge="length", steps=10)) == 0
    rewards = [step["reward"] for step in steps_of()]
    assert sum(rewards[-4:]) > 1.2 * sum(rewards[:4]), rewards
    assert f"; reward {rewards[0]:.3f} -> {rewards[-1]:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_losses_are_those_of_trls_trainer_on_the_plain_model(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own trainer, on a plain model with torch's AdamW, given the same answers and rewards."""
    import trl
    from datasets import Dataset

    given: list[dict[str, Any]] = []
    from outcore.train.methods.rollouts import Rollouts

    ours = Rollouts.__call__
    with monkeypatch.context() as patch:
        patch.setattr(Rollouts, "__call__", lambda self, *args: given.append(ours(self, *args)) or given[-1])
        assert main(command("--method", method, judge="length")) == 0
    replayed, name = iter(given), method.upper()
    arguments = getattr(trl, f"{name}Config")(
        "trl", max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=4, learning_rate=0.01,
        num_generations=4, max_completion_length=8, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
        weight_decay=0.01, logging_steps=1, gradient_checkpointing=False, beta=0.0,
    )  # fmt: skip
    kind, options = getattr(trl, f"{name}Trainer"), {}
    if method == "grpo":
        options = {"rollout_func": lambda prompts, trainer: next(replayed)}
    else:
        monkeypatch.setattr(kind, "_generate_single_turn", lambda *_: next(replayed)["completion_ids"])
    trainer = kind(
        tiny(), lambda completions, **_: [float(len(text)) for text in completions], arguments,
        train_dataset=Dataset.from_list([{"prompt": f"hello {i}"} for i in range(24)]),
        processing_class=tokenizer(), **options,
    )  # fmt: skip
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for ours_, theirs in zip(steps_of(), logged, strict=True):
        assert ours_["reward"] == pytest.approx(theirs["reward"])
        assert ours_["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours_["entropy"] == pytest.approx(theirs["entropy"], rel=1e-4)


def test_prompts_without_room_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    rows = Path("rows.jsonl").read_text().splitlines()
    long = json.dumps({"prompt": "hello " * 40, "want": "world", "number": 0})
    Path("rows.jsonl").write_text("\n".join([*rows[:3], long, *rows[3:]]))
    assert main(command(steps=1)) == 0
    said = "".join(capsys.readouterr())
    assert "1 prompt leaves no room within seq_length 32 for answers of 8 tokens: 4 (" in said
    assert "data: 24 rows" in said
    Path("rows.jsonl").write_text("\n".join([long] * 3))
    assert main(command("--run_name", "s", steps=1)) == 2
    assert "Raise --seq_length, or lower --max_completion_length" in capsys.readouterr().err


REFUSED = {
    "nobody judges": (["--method", "grpo"], "say who judges"),
    "no such file": (["--method", "grpo", "--reward_function", "none.py:judge"], "with a file that is here"),
    "no Python": (["--method", "grpo", "--reward_function", "rows.jsonl:judge"], "is no FILE.py:NAME"),
    "no evaluations": (
        ["--method", "grpo", "--reward_function", "judges.py:length", "--eval_strategy", "epoch"],
        "eval_strategy: method grpo has no such setting",
    ),
    "another method": (["--method", "dpo", "--num_generations", "4"], "it is of --method grpo"),
    "a reference": (["--method", "grpo", "--reward_function", "judges.py:length", "--beta", "0.1"], "Add --lora_r 16"),
    "half a prompt": (
        ["--method", "grpo", "--reward_function", "judges.py:length", "--num_generations", "7"],
        "whole prompts",
    ),
    "evaluation": (["--method", "grpo", "--reward_function", "judges.py:length", "--eval_steps", "2"], "eval_steps: "),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, words = REFUSED[what]
    assert main(["train", "model", "--dataset", "rows.jsonl", "--seq_length", "32", *flags]) == 2
    assert words in capsys.readouterr().err
    assert not Path("checkpoints").exists()


def test_messages_have_their_own_keys_and_rewards_are_of_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    """A table of rows would give each message the keys of all others."""
    words = copy.deepcopy(tokenizer())
    words.chat_template = "{% for m in messages %}{% if 'name' in m %}{{ m.name | length }}{% endif %}{{ m.content }}\n"
    words.chat_template += "{% endfor %}{% if messages[0].name is none %}{{ raise_exception('no name') }}{% endif %}"
    words.save_pretrained("model")
    named, other = {"role": "user", "content": "x", "name": "bob"}, {"role": "user", "content": "hello"}
    rows = [{"prompt": [*[named] * (number % 2), other]} for number in range(8)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    judge = "def f(prompts, completions, **_):\n    assert all(None not in m.values() for p in prompts for m in p)\n"
    Path("judges.py").write_text(f"{judge}    return [1e30 * len(text) for text in completions]")
    assert main(command("--lora_r", "4", judge="f", steps=2)) == 2
    assert "e+30 for answer 1, which is no reward" in capsys.readouterr().err


def test_no_room_for_an_answer_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("outcore.train.methods.rollouts.available_ram_bytes", lambda: 0)
    assert main(command(steps=1)) == 1
    assert "of one answer take 16.00 KiB, and there is room for 0 B" in capsys.readouterr().err


def test_a_function_that_is_not_there_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(judge="nothing")) in (1, 2)
    said = capsys.readouterr().err
    assert "judges.py has no function nothing" in said and "model:" not in said


def test_tasks_of_reasoning_gym_judge_to_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym")
    config = Path("model/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 512}))
    flags = ["--dataset", "reasoning_gym:chain_sum", "--num_generations", "4", "--max_completion_length", "8"]
    flags += ["--seq_length", "256", "--max_steps", "1", "--run_name", "r", "--report_to", "none"]
    assert main(["train", "model", "--method", "grpo", *flags]) == 0
    assert "data: 1,000 rows" in capsys.readouterr().out and "rewards/reasoning_gym/mean" in steps_of()[0]


def test_a_run_keeps_the_promises_of_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Chats end where their template ends them, in rollouts and in the export; other settings, another base and other
    rows are refused when the run goes on."""
    words = copy.deepcopy(tokenizer())  # which is cached
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.chat_template = TURNS
    words.save_pretrained("model")
    model = tiny()
    model.resize_token_embeddings(len(words))
    end = words.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.eos_token_id = words.eos_token_id
    model.save_pretrained("model")
    rows = [{"prompt": [{"role": "user", "content": f"hello {i}"}], "number": i + 1} for i in range(12)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(command("--lora_r", "4", steps=2)) == 0
    shutil.rmtree("checkpoints/r/step-00000002")
    assert end in json.loads(Path("final_model/r/generation_config.json").read_text())["eos_token_id"]
    header = read_metrics("logs/r/metrics.jsonl").header
    assert header is not None and header["config"]["reward_function"] == "judges.py:length"
    capsys.readouterr()
    again = ["--lora_r", "4", "--resume_from_checkpoint", "auto"]
    assert main(command(*again, "--num_generations", "2", steps=2)) == 1
    assert "made with num_generations 4, this run has 2" in capsys.readouterr().err
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows[:8])))
    assert main(command(*again, steps=2)) == 1
    assert "rows" in capsys.readouterr().err
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = Path("model/model.safetensors")
    save_file({name: value * 1.5 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    assert main(command(*again, steps=2)) == 1
    assert "model has changed since: the adapter was trained over other weights" in capsys.readouterr().err
