"""Label smoothing and kinds of adapters: equal to transformers' Trainer and to peft on a small resident model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore.engine.stream.engine import StreamEngine
from outcore.train.run import main
from tests.train.jobs import ENGINES, fixtures, flags, metrics, states, weights

corpus, shared, straight, straight_by, in_the_repository = fixtures


@pytest.mark.parametrize("engine", ["stream", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_label_smoothing_of_a_run(tmp_path, corpus, straight, monkeypatch, engine):
    from transformers import AutoModelForCausalLM
    from transformers.trainer_pt_utils import LabelSmoother

    from outcore.engine.deepspeed.engine import DeepSpeedEngine

    kind: Any = StreamEngine if engine == "stream" else DeepSpeedEngine
    seen: list[dict[str, torch.Tensor]] = []
    original = kind.train_step
    monkeypatch.setattr(
        kind, "train_step", lambda self, batches, lr: (seen.extend(batches), original(self, batches, lr))[1]
    )
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "1", "--eval_steps", "0", "--no_export")
    argv += ["--model_name_or_path", str(straight / "export/r"), "--precision", "fp32", "--packing", "off"]
    assert main([*argv, *ENGINES[engine], "--label_smoothing_factor", "0.1"]) == 0
    model = AutoModelForCausalLM.from_pretrained(straight / "export/r", dtype=torch.float32).eval()
    total, count = 0.0, 0
    for batch in seen:
        with torch.no_grad():
            logits = model(batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        total += float(LabelSmoother(epsilon=0.1)({"logits": logits}, batch["labels"], shift_labels=True)) * tokens
        count += tokens
    record = next(line for line in metrics(tmp_path) if line.get("step") == 1 and "event" not in line)
    assert record["loss"] == pytest.approx(total / count, rel=1e-4)


def test_rank_stabilized_adapters_merge_as_peft_merges_them(tmp_path: Path, corpus: Path, straight: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = straight / "export/r"
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "2", "--eval_steps", "0", "--lr", "1e-2")
    argv += ["--model_name_or_path", str(base), "--lora_r", "9", "--use_rslora", "--init_lora_weights", "gaussian"]
    argv += ["--lora_target_modules", "all-linear", "--precision", "fp32"]
    assert main(argv) == 0
    drawn = [
        v
        for k, v in states(tmp_path / "checkpoint/r/step-00000002").items()
        if k.startswith("model:") and "lora_A" in k
    ]
    assert torch.cat([value.flatten() for value in drawn]).std() == pytest.approx(1 / 9, rel=0.15)
    adapter = tmp_path / "adapter"
    from outcore.cli import main as outcore

    assert outcore(["export", str(tmp_path / "checkpoint/r"), "--out", str(adapter)]) == 0
    said = json.loads((adapter / "adapter_config.json").read_text())
    assert said["use_rslora"] and Path(said["base_model_name_or_path"]) == base.absolute()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload().state_dict()
    for name, value in weights(tmp_path / "export/r").items():
        # its base's 16-bit type
        torch.testing.assert_close(value.float(), merged[name].float(), rtol=8e-3, atol=1e-4, msg=name)
