"""Every setting alive: another value than its default changes what a run is told or does, or is refused in words."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore.common.quantities import GIB
from outcore.config import FIELDS, ConfigError, DeepSpeedFile, ProcessFacts, TrainConfig, parse, resolve
from outcore.engine.decide import choose_engine
from outcore.engine.deepspeed.config.builder import RunFacts, build_config
from outcore.train.command import main
from tests.config.flips import ELSEWHERE, RUN, TOLD
from tests.engine.deepspeed.config_cases import TINY, accept
from tests.engine.even_model import EvenModel
from tests.forked import ROOT
from tests.train.jobs import SMALL_MODEL, fixtures

corpus, *_, in_the_repository = fixtures

MODEL = EvenModel(10**9, 10**9, 10, 100, (64, 64), 40 * GIB, has_cuda=True, row_tokens=32)
"""On a machine with a GPU."""


def argv_of(values: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def told(values: Mapping[str, Any]) -> dict[str, Any] | str:
    """What the engine of such a run is told; or why there is none."""
    try:
        config = parse(argv_of(values), TrainConfig, "test", "")
        facts = ProcessFacts("bf16" if config.precision == "auto" else config.precision)
        settings = resolve(config, DeepSpeedFile(), facts)
        name = choose_engine(settings).name
    except ConfigError as error:
        return str(error)
    if name == "stream":
        return {"engine": name, **asdict(MODEL.decide(settings, nvme_check=accept).told)}
    staged = settings.offload.engine == "staged"
    built = build_config(settings, TINY, RunFacts(), nvme_check=accept, staged=staged)
    return {"engine": name, **built.config, "homes": asdict(built.offload)}


def test_the_lists_have_every_setting_once() -> None:
    assert sorted([*TOLD, *RUN, *ELSEWHERE]) == sorted(FIELDS)
    for name, place in ELSEWHERE.items():
        assert name in (ROOT / "tests" / place).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TOLD)
def test_an_engine_is_told_of_it(name: str) -> None:
    value, beside = TOLD[name]
    before, after = told(beside), told({**beside, name: value})
    assert isinstance(before, dict) and after != before
    if isinstance(after, str):
        assert name in after


RECORDS = (
    "metrics.jsonl", "plan.json", "trainer.json", "manifest.json", "tokenizer_config.json", "outcore-checksums.json",
)  # fmt: skip
"""Files that repeat the settings, hold times, or are written by transformers in one order or another."""
MEASURES = ("step", "loss", "lr", "grad_norm", "tokens", "eval_loss", "event")


def outcome(values: dict[str, Any], root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a run left behind and said, without times and without what only repeats its settings."""
    capsys.readouterr()
    code = main(argv_of(values))
    said = capsys.readouterr()
    is_ordered = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    rows = [
        json.loads(line) for path in files if path.name == "metrics.jsonl" for line in path.read_text().splitlines()
    ]
    kept = [json.loads(path.read_text()) for path in files if path.name == "trainer.json"]
    words = (said.out + said.err).replace(str(root), "")
    lines = [line for line in words.splitlines() if not line.startswith(("start: ", "done: ", "tokenising "))]
    return {
        "code": code,
        "ordered": is_ordered,
        "files": {str(p.relative_to(root)): _bytes(p) for p in files if "cache" not in p.parts or p.parent == root},
        "steps": [{name: row[name] for name in MEASURES if name in row} for row in rows],
        "kept": [{name: one[name] for name in ("made_of", "best") if name in one} for one in kept],
        "said": Counter(re.sub(r"[\d.,]+ ?\w*", "#", line.split(" |")[0]) for line in lines),
    }


def _bytes(path: Path) -> str:
    is_record = path.name in RECORDS or "tokens-" in str(path) or path.suffix == ".png" or "tfevents" in path.name
    return "" if is_record else sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Path]:
    """Files and folders that settings name."""
    folder = tmp_path_factory.mktemp("world")
    made = {name: folder / f"{name}.jsonl" for name in ("chat", "questions", "columns", "bad")}
    talk = [{"role": role, "content": f"jumps {n}"} for n, role in enumerate(("user", "assistant") * 2)]
    questions = [{"prompt": "fox " * (n % 5 + 1), "completion": f"jumps {n}"} for n in range(60)]
    columns = [{"question": "fox", "answer": f"jumps {n}", "talk": talk[:2], "text": f"runs {n}"} for n in range(60)]
    made["chat"].write_text("".join(json.dumps({"messages": talk[: 2 + 2 * (n % 2)]}) + "\n" for n in range(60)))
    made["questions"].write_text("".join(json.dumps(row) + "\n" for row in questions))
    made["columns"].write_text("".join(json.dumps(row) + "\n" for row in columns))
    made["bad"].write_text(made["questions"].read_text() + '{"prompt": 3}\n')
    long = [talk[0], {"role": "assistant", "content": "the lazy dog " * 30}]
    with open(made["chat"], "a") as file:
        file.write(json.dumps({"messages": long}) + "\n")
    made["template"] = folder / "template.jinja"
    made["template"].write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    )
    made["corpus"] = corpus
    made["trained"] = folder / "trained"
    assert main(argv_of({**values_of({}, made, made["trained"])})) == 0
    made["base"] = made["trained"] / "export/r"
    made["saved"] = made["trained"] / "checkpoint/r/step-00000002"
    made["own_code"] = shutil.copytree(made["base"], folder / "own_code")
    (made["own_code"] / "outcore-checksums.json").unlink()
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    own = {**json.loads((made["base"] / "config.json").read_text()), "model_type": "own", "auto_map": auto}
    (made["own_code"] / "config.json").write_text(json.dumps(own))
    (made["own_code"] / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return made


def values_of(changes: Mapping[str, Any], world: dict[str, Path], root: Path) -> dict[str, Any]:
    """All settings of a small run with these changes."""
    usual = {
        "dataset": "{corpus}", "seq_length": 32, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "sample_steps": 0, "sample_tokens": 4, "report_to": "none", "logging_steps": 100, "run_name": "r",
        "data_cache_dir": "{root}/cache", "checkpoint_dir": "{root}/checkpoint", "log_dir": "{root}/log",
        "export_dir": "{root}/export", "max_steps": 3, "save_steps": 2, "eval_steps": 0,
    }  # fmt: skip
    if not {"model_name_or_path", "preset", "config_file", "model_module"} & changes.keys():
        usual |= {"config_overrides": SMALL_MODEL, "random_base": True}
    places = {"{root}": root, **{f"{{{name}}}": path for name, path in world.items()}}

    def filled(value: Any) -> Any:
        for name, path in places.items() if isinstance(value, str) else ():
            value = value.replace(name, str(path))
        return value

    return {name: filled(value) for name, value in {**usual, **changes}.items()}


@pytest.fixture(scope="module")
def before() -> dict[str, dict[str, Any]]:
    """Outcomes of the runs that several settings are compared with."""
    return {}


@pytest.mark.more(after=3)
@pytest.mark.parametrize("name", RUN)
@pytest.mark.usefixtures("in_the_repository")
def test_a_run_shows_it(
    name: str,
    world: dict[str, Path],
    before: dict[str, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    value, beside = RUN[name]
    key = json.dumps(dict(beside))
    if key not in before:
        before[key] = outcome(values_of(beside, world, tmp_path / "a"), tmp_path / "a", capsys)
    after = outcome(values_of({**beside, name: value}, world, tmp_path / "b"), tmp_path / "b", capsys)
    was = before[key]
    differ = [what for what in was if was[what] != after[what]]
    assert differ


@pytest.mark.usefixtures("in_the_repository")
def test_the_same_run_twice_has_one_outcome(
    world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else every setting would seem to be alive."""
    one, two = (outcome(values_of({}, world, tmp_path / name), tmp_path / name, capsys) for name in "ab")
    assert one == two and one["code"] == 0 and len(one["steps"]) > 3
