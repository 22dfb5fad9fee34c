"""Answers over GPUs: what a case found is written when it is over."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "infer"


@pytest.mark.more
def test_a_case_is_written_before_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All was written at the end: a run that was cut off in its second case had nothing of the first."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    spec = importlib.util.spec_from_file_location("over_gpus", FOLDER / "over_gpus.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    calls: list[int] = []

    def run_requests(opened, asked, tokens, temperature) -> dict:
        calls.append(len(asked))
        if len(calls) == 3:  # after short ones and the first case
            raise RuntimeError("cut off")
        return {"passes": 8}

    # One process, which needs no group, in which other tests go on.
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **more: None)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda found, mine: found.__setitem__(0, mine))
    loaded = SimpleNamespace(loaded=SimpleNamespace(model=torch.nn.Linear(2, 2)))
    monkeypatch.setattr(module, "opened_with", lambda *args, **more: SimpleNamespace(found=loaded))
    monkeypatch.setattr(module, "run_requests", run_requests)
    args = argparse.Namespace(
        gpus=[1, 1], cap_gib=1.0, dry_run=True, model="tiny", context=8, requests=4, prompt=4, vocab=9, answer=2,
        warm_answer=1, ram_growth=0.1, out=tmp_path / "out.json",
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="cut off"):
        module.answer(0, args, str(tmp_path))
    (found,) = json.loads(args.out.read_text())["runs"]
    assert found["gpus"] == 1 and found["ranks"][0]["answered"] == 4 and not found["problems"]
