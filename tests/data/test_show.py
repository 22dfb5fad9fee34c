"""`outcore data`: rows shown with what bears loss, the page, and the tables of the docs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outcore.cli import main as outcore
from outcore.data import DataSettings, prepare_data
from tests.data import tables
from tests.data.fixtures import tiny_tokenizer, write_jsonl
from tests.forked import ROOT

TALK = {
    "messages": [{"role": "user", "content": "the fox?"}, {"role": "assistant", "content": "a dog 🙂 <b>"}],
    "url": "x",
}


def shown(folder: Path, *flags: str) -> list[str]:
    tiny_tokenizer().save_pretrained(str(folder / "model"))
    page = str(folder / "page.html")
    given = [str(folder / "data"), "--model", str(folder / "model"), "--data_cache_dir", str(folder / "cache")]
    return ["data", *given, "--html", page, *flags]


def test_rows_are_shown_with_what_bears_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "a.jsonl", [TALK] * 6 + ["{broken"])
    write_jsonl(tmp_path / "data" / "b.jsonl", [{"prompt": "the fox ", "completion": "jumps"}])
    write_jsonl(tmp_path / "data" / "c.jsonl", [{"text": "seven wizards"}])
    assert outcore(shown(tmp_path, "--rows", "4")) == 0
    said = capsys.readouterr().out
    for words in (
        "messages: loss on every assistant message", "<|im_start|>assistant\n⟦a dog 🙂 <b><|im_end|>⟧\n",
        "the fox ⟦jumps<|endoftext|>⟧", "columns that are not used: 'url' (6 rows)", "left out: 1 malformed row,",
        "marks what the assistant writes itself", "(from text)",
    ):  # fmt: skip
        assert words in said, said
    assert "no loss on nothing" not in said and "text: loss on all of it\n" in said
    assert said.count("document ") == 4 and "rows: 1 to train on, 0 to evaluate, of 1024 tokens, packed" in said
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<span class="l" title="' in page and "🙂" in page and "&lt;</span>" in page and "<script" not in page


def test_a_run_that_ended_here_is_a_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [{"text": "seven wizards"}])
    tiny_tokenizer().save_pretrained("final_model/mine")
    assert outcore(["data", "a.jsonl", "--model", "mine"]) == 0


DEEP = "[" * 100_000 + "]" * 100_000
GOOD = '{"text": "seven wizards"}'


@pytest.mark.parametrize(("name", "content"), [
    ("a.jsonl", f"{DEEP}\n{GOOD}\n"), ("a.jsonl", f'{GOOD}\n{{"text": {DEEP}}}\n'),
    ("a.json", f'[{GOOD},\n{{"text": {DEEP}}}]'), ("a.json", f'{{"text": {DEEP}}}'),
    ("a.csv", f'text,history,messages\n"[{{""a"": {DEEP}}}]",{DEEP},{DEEP}\n'),
    ("a.jsonl", json.dumps({"instruction": "x", "output": "y", "history": DEEP})),
])  # fmt: skip
def test_brackets_that_nest_too_deeply_are_a_bad_row(tmp_path: Path, name: str, content: str, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(content)
    assert outcore(shown(tmp_path)) in (0, 2)
    said = capsys.readouterr()
    assert "nested too deeply" in said.out + said.err or name == "a.csv"


def test_control_characters_of_rows_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "data").mkdir()
    rows = [{"text": "red \x1b[31m bell \x07 c1 \x9b31m turned \u202e\ttab", "col\x1b[2J": 1}]
    write_jsonl(file := tmp_path / "data" / "a\x1b[2J.jsonl", rows * 3)
    assert outcore([word.replace(str(tmp_path / "data"), str(file)) for word in shown(tmp_path)]) == 0
    said = capsys.readouterr()
    told = said.out + said.err
    assert r" \x1b[31m bell \x07 c1 \x9b31m turned \u202e" in told and "\ttab" in told
    assert not set(told) & set("\x1b\x07\x9b\u202e")


@pytest.mark.skipif(os.name == "nt" or sys.platform == "darwin", reason="file names are any bytes on Linux alone")
def test_a_file_name_that_is_no_utf_8_is_read_and_shown(tmp_path: Path):
    os.makedirs(folder := os.fsencode(tmp_path) + b"/d\xff")
    with open(folder + b"/n\xfe.txt", "w") as file:
        file.write("seven wizards")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "outcore.cli", "data", folder]
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "wizards" in found.stdout and r"d\udcff" in found.stdout + found.stderr
    assert r"d\udcff" in (tmp_path / "outcore_data.html").read_text(encoding="utf-8")


def test_questions_and_answers_of_a_table_may_be_written_as_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("question,answer\n" + "the fox?,a dog\n" * 4)
    assert outcore(shown(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "<|im_start|>" not in said and "without the chat template: --as_chat true puts them through it" in said
    assert outcore([*shown(tmp_path), "--as_chat"]) == 0
    said = capsys.readouterr().out
    assert "<|im_start|>user\nthe fox?<|im_end|>" in said and "<|im_start|>assistant\n⟦a dog<|im_end|>⟧" in said
    assert "without the chat template" not in said and "changes nothing" not in said
    (tmp_path / "data" / "a.csv").write_text("text\n" + "seven wizards\n" * 4)
    assert outcore([*shown(tmp_path), "--as_chat"]) == 0
    assert "--as_chat changes nothing" in capsys.readouterr().out


def test_rows_are_as_long_as_the_model_can_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "a.jsonl", [TALK] * 6)
    flags = shown(tmp_path)
    assert outcore(flags) == 0
    said = capsys.readouterr()
    assert "of 1024 tokens" in said.out and "how long its rows may be: --seq_length says it (1024)" in said.err
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 32}')
    assert outcore(flags) == 0
    said = capsys.readouterr()
    assert "of 32 tokens" in said.out and "how long" not in said.err


def test_wrong_usage_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert outcore(["data", str(tmp_path / "nothing.jsonl"), "--html", "none"]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "a.jsonl", [TALK])
    assert outcore(shown(tmp_path, "--rows", "0")) == 2
    assert outcore([*shown(tmp_path), "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert outcore([*shown(tmp_path), "--chat_template", str(tmp_path / "no.jinja")]) == 2
    assert "no.jinja: cannot be read" in capsys.readouterr().err


def test_a_template_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "a.jsonl", [TALK])
    (tmp_path / "my.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content + eos_token }}{% endfor %}")
    assert outcore([*shown(tmp_path), "--chat_template", str(tmp_path / "my.jinja")]) == 0
    assert "<assistant>⟦a dog 🙂 <b><|endoftext|>⟧" in capsys.readouterr().out


def test_the_header_tells_what_bears_loss(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", [TALK, {"messages": [*TALK["messages"], *TALK["messages"]]}])
    settings = DataSettings(str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path), eval_fraction=0.0)
    header = prepare_data(settings, tiny_tokenizer()).summary.header()
    assert json.loads(json.dumps(header)) == header
    assert header["documents"] == 2 and sum(header["documents_by_tenths_of_loss"]) == 2
    spread = header["loss_tokens_per_document"]
    assert 2 * spread["least"] == spread["most"] and spread["mean"] * 2 == header["loss_tokens"]
    assert header["unused_columns"] == {"url": 1} and header["notices"] == {}


def test_the_docs_have_the_tables_of_the_code():
    page = tables.PAGE.read_text(encoding="utf-8")
    assert page == tables.with_tables(page), "write them: python -m tests.data.tables"
