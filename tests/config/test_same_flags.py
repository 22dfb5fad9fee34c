"""One flag, one meaning: the commands that run a model take the flags of training by the same names."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from outcore.config import FIELDS, Field
from outcore.config.commands import (
    chat_flags,
    data_flags,
    evaluate_flags,
    generate_flags,
    score_flags,
    serve_flags,
    watch_flags,
)
from outcore.config.spec import fields_of
from outcore.performance.command import parser as performance_parser
from outcore.plan.fields import PlanConfig, parse_plan
from outcore.probe.flags import parser as probe_parser
from tests.forked import ROOT

BY_NAME = {name: row for row in FIELDS.values() for name in (row.name, *row.spec.aliases)}
"""Every spelling of a flag of training."""
OTHERWISE = {
    "preset": "a model that exists has its shape: balanced, latency or throughput",
    "quantize": "packs weights as they are loaded; left out: as the model is stored",
}
"""Flags of inference with values of their own, and why."""
SAME_BY_OTHER_NAME = {"nvme_path": "nvme_offload_path", "compile": "compile", "precision": "precision"}
"""Destination in inference -> the flag of training that means it."""


@pytest.mark.parametrize("parser", [generate_flags, evaluate_flags, score_flags, chat_flags])
def test_inference_takes_the_flags_of_training(parser: Callable[[], argparse.ArgumentParser]) -> None:
    flags = {name.removeprefix("--"): action for action in parser()._actions for name in action.option_strings}
    for ours, theirs in SAME_BY_OTHER_NAME.items():
        assert flags[theirs].dest == ours
    for name in sorted(flags.keys() & BY_NAME.keys()):
        if name not in OTHERWISE:
            assert _differs(BY_NAME[name], flags[name]) == "", name


def test_what_answers_aim_at(capsys: pytest.CaptureFixture[str]) -> None:
    """One reader in chat, many in serve; the flag's old name for a while."""
    parsers = {"latency": [chat_flags], "balanced": [generate_flags, score_flags, evaluate_flags, serve_flags]}
    for usual, of_commands in parsers.items():
        for parser in of_commands:
            argv = ["m", "--input", "x"] if parser in (generate_flags, score_flags) else ["m"]
            assert parser().parse_args(argv).preset == usual
            for flag in ("--aim", "--preset"):
                assert parser().parse_args([*argv, flag, "throughput"]).preset == "throughput"
            assert "--aim" in parser().format_help() and "--preset" not in parser().format_help()


def _differs(row: Field, action: argparse.Action) -> str:
    """How the flag differs from that of training; '' where it is of one kind and of the same values."""
    if row.is_switch:
        return "" if action.nargs == 0 or (action.nargs, action.const) == ("?", "true") else "a switch there"
    if row.choices:
        return "" if action.choices is not None and set(action.choices) <= set(row.choices) else "other choices"
    return "" if (action.type or str) is row.kind or row.kind is str else f"{row.kind.__name__} there"


def test_plan_has_every_field_of_training_as_it_is() -> None:
    rows = fields_of(PlanConfig)
    assert {name: (rows[name].annotation, replace(rows[name].spec, common=False)) for name in FIELDS} == {
        name: (row.annotation, replace(row.spec, common=False)) for name, row in FIELDS.items()
    }
    assert set(rows) > PlanConfig.UNSHOWN
    assert parse_plan(["--micro_batch_size", "3", "--model", "x"]).per_device_train_batch_size == 3


def test_the_performance_test_hands_on_what_is_not_its_own() -> None:
    argv = ["--quick", *(f"--{name}=1" for name in BY_NAME)]
    _, rest = performance_parser().parse_known_args(argv)
    assert rest == argv[1:], "no flag of its own has the name of one of training"


REFUSED = """
import sys
from outcore.cli import COMMANDS, main

for name in COMMANDS:
    try:
        code = main([name, "--no_such_flag"])
    except SystemExit as left:
        code = left.code
    assert code == 2, (name, code)
    assert not {"torch", "transformers", "numpy"} & sys.modules.keys(), name
"""

SCRIPT = """
import runpy, sys
for script in ("train_model.py", "performance_test.py", "gds_optimizer.py"):
    sys.argv = [script, "--no_such_flag"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        print(left.code, "torch" in sys.modules)
"""


def test_a_mistyped_flag_of_a_command_is_a_line_that_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for parser, argv, words in (
        (generate_flags, ["m", "--tempreature", "1"], "--tempreature 1. Did you mean '--temperature'?"),
        (chat_flags, [], "required: model. outcore chat --help"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parser().parse_args(argv)
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


ANSWERING = {"generate": generate_flags, "chat": chat_flags, "score": score_flags, "evaluate": evaluate_flags}
ANSWERING |= {"serve": serve_flags, "data": data_flags}


@pytest.mark.parametrize("name", ANSWERING)
def test_help_of_a_command_is_short_and_says_how_to_see_the_rest(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*argv: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            ANSWERING[name]().parse_args(argv)
        return capsys.readouterr().out

    short, everything = told("--help"), told("--help", "all")
    assert f"outcore {name} --help all lists every one" in " ".join(short.split())
    assert len(short.splitlines()) < 0.6 * len(everything.splitlines()) and len(short.splitlines()) < 60
    parser = ANSWERING[name]()
    flags = [action.option_strings[0] for action in parser._actions if action.option_strings]
    hidden = {"--no_pin_memory", "--preset", "--nvme_path"}  # the other word of a switch, a former name
    assert all(flag in everything for flag in flags if flag not in hidden)
    assert set(parser._common) <= {action.dest for action in parser._actions}  # type: ignore[attr-defined]


def test_a_folder_on_a_drive_has_one_name_and_its_former_one_works(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["m", "--nvme_path", "a", "--nvme_offload_path", "b"]
    assert chat_flags().parse_args(argv).nvme_path == ["a", "b"]
    with pytest.raises(SystemExit, match="0"):
        chat_flags().parse_args(["--help", "all"])
    said = capsys.readouterr().out
    assert "--nvme_offload_path" in said and "--nvme_path" not in said


def test_dashes_are_underscores_and_a_model_may_be_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["m", "--max-tokens=5"], ["--model", "m", "--max_tokens", "5"], ["--max-tokens", "5", "--model=m"]):
        args = chat_flags().parse_args(argv)
        assert (args.model, args.max_tokens) == ("m", 5)
    assert generate_flags().parse_args(["--model_name_or_path", "m", "--prompt", "a-b--c"]).prompt == "a-b--c"
    assert data_flags().parse_args(["x.jsonl", "--model", "m"]).model == "m"
    for spelling in ("--logs", "--log_dir", "--log-dir"):
        assert watch_flags().parse_args([spelling, "there"]).log_dir == "there"
        assert probe_parser(ROOT).parse_args([spelling.replace("-dir", "_dir"), "there"]).logs == "there"
    with pytest.raises(SystemExit, match="2"):
        chat_flags().parse_args(["m", "--model", "other"])
    assert "unrecognized arguments" in capsys.readouterr().err
    for text in ("The quick fox", ""):
        with pytest.raises(SystemExit, match="2"):
            generate_flags().parse_args(["m", text])
        assert f": {text}. A text to go on from is given by --prompt. outcore" in capsys.readouterr().err


def test_a_mistyped_flag_is_refused_before_torch_is_imported() -> None:
    """Its import takes seconds, and would stand between a typing error and the line that tells it."""
    done = subprocess.run([sys.executable, "-c", REFUSED], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.stderr.count("--no_such_flag") >= 3 and done.stdout == "2 False\n" * 3, done.stderr
