"""mlflow, the hub and chat templates, each against a local stand-in of its own client, through the command line."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from outcore.train.run import main
from tests.train.jobs import fixtures, flags

corpus, shared, straight, straight_by, in_the_repository = fixtures
MLFLOW = """
import json, pathlib
LOG = pathlib.Path(__file__).with_name("calls.jsonl")
def __getattr__(name):
    def call(*args, **kwargs):
        with open(LOG, "a") as file:
            file.write(json.dumps([name, list(args), kwargs]) + "\\n")
    return call
"""


class Hub:
    """As much of HfApi as an upload uses."""

    def __init__(self) -> None:
        self.uploaded: list[str] = []

    def whoami(self) -> dict[str, str]:
        return {"name": "me"}

    def create_repo(self, repository: str, **kwargs: Any) -> str:
        assert kwargs == {"private": True, "exist_ok": True}
        return f"https://huggingface.co/{repository}"

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        self.uploaded += [repo_id, *sorted(path.name for path in Path(folder_path).iterdir())]


def test_mlflow_and_the_hub(tmp_path, corpus, monkeypatch, capsys):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/mlflow.py").write_text(MLFLOW)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "2", "--eval_steps", "1", "--report_to", "mlflow")
    argv += ["--push_to_hub", "me/tiny"]
    assert main(argv) == 2
    assert "no token" in capsys.readouterr().err and not (tmp_path / "log").exists(), "before anything is made"
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    assert main(argv) == 0
    assert hub.uploaded[0] == "me/tiny" and {"config.json", "model.safetensors"} <= set(hub.uploaded)
    assert "uploaded: https://huggingface.co/me/tiny" in capsys.readouterr().out
    calls = [json.loads(line) for line in (tmp_path / "modules/calls.jsonl").read_text().splitlines()]
    assert [name for name, *_ in calls[:3]] == ["set_experiment", "start_run", "log_params"] and calls[1][2] == {
        "run_name": "r"
    }
    logged = [(kwargs["step"], set(args[0])) for name, args, kwargs in calls if name == "log_metrics"]
    assert any(step == 1 and "train/loss" in names for step, names in logged)
    assert any(step == 2 and "eval/eval_loss" in names for step, names in logged) and calls[-1][0] == "end_run"
    monkeypatch.setattr(hub, "upload_folder", lambda **kwargs: (_ for _ in ()).throw(OSError("no network")))
    assert main([*argv, "--run_name", "s"]) == 1
    assert "The model is whole in" in capsys.readouterr().err and (tmp_path / "export/s/config.json").is_file()
    assert main([*argv, "--push_to_hub", "tiny"]) == 2 and "ORG/NAME" in capsys.readouterr().err


def test_a_chat_template_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "chat.jinja").write_text(template)
    chats = [
        {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(30)
    ]
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(json.dumps(chat) for chat in chats))
    argv = flags(
        tmp_path, data, "--run_name", "r", "--max_steps", "1", "--eval_steps", "0", "--sample_prompt", "What now?"
    )
    assert main([*argv, "--chat_template", str(tmp_path / "chat.jinja"), "--sample_steps", "1"]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "export/r").chat_template == template
    assert "<user>What now?\n<assistant>>>>" in (tmp_path / "log/r/samples.txt").read_text()
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}")
    assert main([*argv, "--run_name", "s", "--chat_template", str(tmp_path / "bad.jinja")]) == 2
    assert "not a Jinja template" in capsys.readouterr().err
