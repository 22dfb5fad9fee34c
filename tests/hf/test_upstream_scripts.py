"""TRL's own scripts, unmodified: one flag streams the model, and what is trained has the plain run's bits."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from outcore.hf.visit import LayerVisit
from tests.hf.callers import pairs, text, tiny, tokenizer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
STREAMED = '{"quantization_config": {"quant_method": "outcore", "vram_gib": 6.5}}'
DATA = {"sft": text, "dpo": pairs, "reward": pairs}


def implicit(rows: Dataset) -> Dataset:
    """Pairs with the prompt in both."""
    whole = [{key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in rows]
    return Dataset.from_list(whole)


@pytest.mark.more(after=1)
@pytest.mark.parametrize("script", DATA)
@pytest.mark.parametrize("flags", [[], ["--use_peft", "--lora_task_type", "CAUSAL_LM"]], ids=["full", "lora"])
def test_a_script_of_trl_leaves_the_same_bits(
    script: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("qwen3", labels=script == "reward").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = implicit(DATA[script]()) if script == "reward" else DATA[script]()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    flags = ["--use_peft", "--lora_task_type", "SEQ_CLS"] if flags and script == "reward" else flags
    visits: list[int] = []
    own = LayerVisit.output
    monkeypatch.setattr(LayerVisit, "output", lambda visit: (visits.append(visit.index), own(visit))[1])
    found = []
    for out, more in (("plain", []), ("streamed", ["--model_init_kwargs", STREAMED])):
        said = {
            "model_name_or_path": tmp_path / "model", "dataset_name": tmp_path / "data", "dtype": "float32",
            "output_dir": tmp_path / out, "max_steps": 2, "use_cpu": True, "report_to": "none", "bf16": False,
            "per_device_train_batch_size": 4, "save_strategy": "no", "learning_rate": 1e-2, "seed": 1,
        }  # fmt: skip
        words = [word for name, value in said.items() for word in (f"--{name}", str(value))]
        monkeypatch.setattr(sys, "argv", [script, *words, *flags, *more])
        torch.manual_seed(0)
        runpy.run_module(f"trl.scripts.{script}", run_name="__main__")
        name = "adapter_model.safetensors" if flags else "model.safetensors"
        found.append(load_file(tmp_path / out / name))
        assert bool(visits) == (out == "streamed")
    plain, streamed = found
    assert list(plain) == list(streamed)
    assert all(torch.equal(tensor, streamed[name]) for name, tensor in plain.items())
    before = load_file(tmp_path / "model/model.safetensors")
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in before.items() if name in plain) or flags
