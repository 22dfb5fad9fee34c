"""The scripts of examples/hf run as they are printed, on a tiny model."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.forked import ROOT
from tests.hf.callers import pairs, text, tiny, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "examples/hf").glob("*.py")))
def test_an_example_trains_and_saves(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("qwen3").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    data = pairs() if script == "dpo.py" else text()
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in data))
    source = (ROOT / "examples/hf" / script).read_text()
    assert "max_steps=100" in source
    (tmp_path / script).write_text(source.replace("max_steps=100", "max_steps=2, use_cpu=True, bf16=False"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "model"), str(tmp_path / "rows.jsonl")])
    runpy.run_path(str(tmp_path / script), run_name="__main__")
    if script == "full.py":
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "trainer_output").config.vocab_size
    else:
        assert (tmp_path / "trainer_output/adapter_model.safetensors").is_file()
