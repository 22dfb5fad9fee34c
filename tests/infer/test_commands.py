"""generate, score and chat as a user gives them; a job killed at any time ends with the same bytes."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore import cli
from outcore.infer import Answer, Request, Sampling
from outcore.infer.commands import Line, result_of
from outcore.infer.commands.chat import Conversation
from outcore.infer.opening import InferSettings, open_engine
from tests.forked import ROOT, start_script
from tests.infer.models import greedy_by_transformers
from tests.refused import failing, refused

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["--context", "128", "--ram_gib", "1", "--device", "cpu"]


def write_lines(path, count: int, **fields) -> None:
    generator = random.Random(5)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"]
    with open(path, "w") as file:
        for i in range(count):
            prompt = " ".join(generator.choices(words, k=generator.randint(1, 12)))
            file.write(json.dumps({"id": i, "prompt": prompt, **fields}) + "\n")


def test_one_prompt(tiny_folder, capsys):
    folder, model, tokenizer = tiny_folder
    given = ["generate", str(folder), *SMALL, "--prompt", "The quick", "--temperature", "0", "--max_tokens", "6"]
    assert cli.main(given) == 0
    ids = tokenizer("The quick")["input_ids"]
    expected = greedy_by_transformers(model, ids, 6)
    said = capsys.readouterr()
    assert said.out.rstrip("\n") == tokenizer.decode(expected, skip_special_tokens=True).rstrip("\n")
    assert "tokens/s" in said.err


MISTYPED = [
    "chat my-rum",
    "generate my-rum --prompt x",
    "score my-rum --input x.txt",
    "serve my-rum --port 0",
    "evaluate my-rum --tasks outcore_sums",
    "data x.txt --model my-rum",
    "plan --model my-rum --nominal",
    "plan --infer my-rum --nominal",
    "train --model_name_or_path my-rum --dataset x.txt",
]


@pytest.mark.more(after=3)
@pytest.mark.parametrize("command", MISTYPED)
def test_a_mistyped_model_names_the_runs_here_at_once(command, tmp_path, capfd, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # taken back when the test is over
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    tries: list[Any] = []

    def refuse(address: Any, *args: Any, **options: Any) -> None:
        tries.append(address)
        raise OSError("no network")

    monkeypatch.setattr("socket.create_connection", refuse)  # also the hub's clients connect by it
    (tmp_path / "final_model/my-run").mkdir(parents=True)
    (tmp_path / "x.txt").write_text("hello\n")
    assert cli.main(command.split()) in (1, 2)
    said = capfd.readouterr().err
    assert "Did you mean 'my-run'?" in said and len(tries) <= 1  # each further one is a pause of up to 8 s
    assert "no way to the hub from here" in said or command.startswith("plan")  # which takes such a name for a shape


ODD_MODEL = [
    *(word for word in MISTYPED if not word.startswith(("plan --infer", "evaluate"))),
    "generate tiny --prompt x --adapter my-rum",
]


@pytest.mark.more(after=3)
@pytest.mark.parametrize("command", ODD_MODEL)
def test_a_model_whose_name_is_no_utf8_is_refused_with_the_reason(command, tiny_folder, tmp_path, capfd, monkeypatch):
    """Its weights' reader would call the file damaged."""
    monkeypatch.chdir(tmp_path)
    odd = os.fsdecode(b"mo\xeddel")
    shutil.copytree(tiny_folder[0], odd)
    shutil.copytree(tiny_folder[0], "tiny")
    (tmp_path / "x.txt").write_text("hello\n")
    assert cli.main(command.replace("my-rum", odd).split()) == 2
    said = capfd.readouterr().err
    assert r"'mo\udceddel' is no UTF-8, and libraries that write" in said and "Rename the folder." in said
    assert "damaged" not in said


def test_jobs_read_and_write_files_whose_names_are_no_utf8(tiny_folder, tmp_path):
    """In a process of their own, whose output takes no such name by itself."""
    source = os.fsencode(tmp_path) + b"/i\xff.jsonl"
    write_lines(source, 2, max_tokens=2)
    outputs = [os.fsencode(tmp_path) + name for name in (b"/answers\xff.jsonl", b"/scores\xff.jsonl")]
    both = "import sys; from outcore.cli import main; job = [*sys.argv[3:], '--output']; "
    both += "sys.exit(main(['generate', *job, sys.argv[1]]) or main(['score', *job, sys.argv[2]]))"
    more = [str(tiny_folder[0]), *SMALL, "--input", source]
    ran = subprocess.run([sys.executable, "-c", both, *outputs, *more], cwd=ROOT, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    assert rb"answers\udcff.jsonl" in ran.stderr + ran.stdout
    for output in outputs:
        with open(output) as file:
            assert len(file.read().splitlines()) == 2


def test_a_measured_machine_tells_forecast_and_run(tiny_folder, tmp_path, capsys, monkeypatch):
    from outcore.infer.opening import forecast
    from outcore.plan import load_hardware

    measured = load_hardware("rtx4070-laptop")
    monkeypatch.setattr(forecast, "load_hardware", lambda: measured)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("The quick brown fox\n")
    common = [str(tiny_folder[0]), *SMALL]
    assert cli.main(["generate", *common, "--prompt", "The", "--max_tokens", "4", "--temperature", "0"]) == 0
    assert cli.main(["score", *common, "--input", "in.txt"]) == 0
    assert capsys.readouterr().err.count("times the forecast of") == 2
    events = [json.loads(line) for line in (tmp_path / "logs/diagnostics/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["generate ended", "score ended"]
    assert all(event["measured_over_forecast"] > 0 and event["passes"] for event in events)
    assert events[0]["answer_tokens"] == 4 and events[0]["placement"]


def test_a_job_keeps_order_shapes_and_errors(tiny_folder, tmp_path, capsys):
    folder = str(tiny_folder[0])
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "n": 2, "seed": 3}
    body["logprobs"] = True
    lines = [
        {"prompt": "The", "max_tokens": 3, "id": "first", "completion": "fox"},  # as in data to train on: not read
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"prompt": "x" * 2000},
        {"custom_id": "d", "method": "POST", "url": "/v1/embeddings", "body": {}},
        {"prompt": "The", "temprature": 1},
        *({"prompt": "The", "n": count} for count in (0, 1.5, "2", True)),
        {"messages": [{"role": "user", "contnet": "Hi"}]},
        {"custom_id": "e", "method": "GET", "url": "/v1/completions", "body": {"prompt": "The"}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n")
    given = [
        "generate", folder, *SMALL, "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"),
    ]  # fmt: skip
    assert cli.main(given) == 1
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found[0]["id"] == "first" and found[0]["usage"]["completion_tokens"] <= 3
    chat = found[1]["response"]["body"]
    of_tokens = [token["logprob"] for choice in chat["choices"] for token in choice["logprobs"]["content"]]
    assert len(of_tokens) == chat["usage"]["completion_tokens"] and max(of_tokens) < 0
    assert found[1]["custom_id"] == "c" and chat["object"] == "chat.completion" and len(chat["choices"]) == 2
    assert "together more than" in found[2]["error"]
    assert found[3]["response"]["status_code"] == 400 and "url" in found[3]["error"]["message"]
    assert "temprature" in found[4]["error"] and "the line is no JSON" in found[-1]["error"]
    assert all("a whole number from 1 to 128" in line["error"] for line in found[5:9])
    assert "'user' has no content" in found[9]["error"] and "must be POST" in found[10]["error"]["message"]
    assert not (tmp_path / "out.jsonl.journal").exists()
    assert "the first that failed: row 3: the prompt has" in capsys.readouterr().err
    before = (tmp_path / "out.jsonl").read_bytes()
    assert cli.main(given) == 1 and "10 of its lines failed" in capsys.readouterr().err
    (tmp_path / "in.jsonl").write_text('{"prompt": "The"}\n')
    assert cli.main(given) == 2 and "it is of another input" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_job_over_rows_without_a_prompt_names_the_row_and_its_fields(tiny_folder, tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", str(tmp_path / "out.jsonl")
    rows = [{"prompt": "The", "max_tokens": 1}, {"question": "a?", "answer": "b"}, {}]
    source.write_text("\n".join(map(json.dumps, rows)))
    given = ["generate", str(tiny_folder[0]), *SMALL, "--input", str(source), "--output", output]
    words = "row 2: a line must have either prompt or messages; its fields: answer, question"
    for _ in range(2):  # as it is answered, and of the output that is there
        assert cli.main(given) == 1 and words in capsys.readouterr().err
    assert json.loads(Path(output).read_text().splitlines()[2])["error"].endswith("its fields: none")


def test_lines_that_are_no_text_get_a_result_each(tiny_folder, tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [b'{"prompt": "The", "max_tokens": 2}', b'{"prompt": "a\xff"}', b"[" * 100_000, b'{"prompt": "\\ud83d"}']
    source.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))  # behind a mark that Windows puts before UTF-8
    given = ["generate", str(tiny_folder[0]), *SMALL, "--input", str(source), "--output"]
    assert cli.main([*given, str(output)]) == 1
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert found[0]["usage"]["completion_tokens"] == 2
    assert ["error" in line for line in found] == [False, True, True, True]
    before = source.read_bytes()
    assert cli.main([*given, str(source), "--overwrite"]) == 2
    assert source.read_bytes() == before and "the file of --input" in capsys.readouterr().err
    assert cli.main([*given, str(tmp_path)]) == 2 and "is a folder" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")  # as /dev/null, which root would replace by a file
    assert cli.main([*given, str(tmp_path / "pipe"), "--overwrite"]) == 2
    assert "no ordinary file" in capsys.readouterr().err and (tmp_path / "pipe").is_fifo()


def test_an_answer_of_no_said_length_takes_what_the_context_leaves(tiny_folder, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompt = [5] * 120
    source.write_text(json.dumps({"prompt": prompt, "ignore_eos": True}) + "\n")
    given = ["generate", str(tiny_folder[0]), *SMALL, "--input", str(source), "--output", str(output)]
    assert cli.main(given) == 0
    assert json.loads(output.read_text())["usage"] == {
        "prompt_tokens": 120, "completion_tokens": 8, "total_tokens": 128,
    }  # fmt: skip
    output.unlink()
    assert cli.main([*given, "--max_tokens", "20"]) == 1  # said, so refused
    assert "together more" in json.loads(output.read_text())["error"]


def kill_and_go_on(folder, tmp_path, kills: int, count: int) -> None:
    source = tmp_path / "in.jsonl"
    write_lines(source, count, max_tokens=40, temperature=1.0, ignore_eos=True)

    def command(output):
        return [
            "generate", str(folder), *SMALL, "--max_sequences", "4", "--seed", "7", "--chunk_tokens", "32",
            "--input", str(source), "--output", str(output),
        ]  # fmt: skip

    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert cli.main(command(tmp_path / "whole.jsonl")) == 0
    output, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    generator, killed = random.Random(1), 0
    for round_ in range(kills + 1):
        child = start_script(ROOT / "outcore/cli.py", command(output), environ, tmp_path / "log")
        wanted = (journal.stat().st_size if journal.exists() else 0) + generator.randint(1, 900)
        while round_ < kills and child.poll() is None:
            if journal.exists() and journal.stat().st_size >= wanted:
                child.kill()
                killed += 1
                break
            time.sleep(0.01)
        child.wait(600)
        if output.exists():
            break
    assert killed >= min(kills, 2), (tmp_path / "log").read_text()[-2000:]
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.more
def test_a_killed_job_goes_on(tiny_folder, tmp_path):
    kill_and_go_on(tiny_folder[0], tmp_path, kills=2, count=16)


@pytest.mark.slow
def test_twenty_kills(tiny_folder, tmp_path):
    kill_and_go_on(tiny_folder[0], tmp_path, kills=20, count=120)


def test_ctrl_c_is_one_line_and_a_job_says_what_is_kept(tiny_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("outcore.infer.commands.generate.open_engine", failing(KeyboardInterrupt()))
    asked = tmp_path / "in.jsonl"
    asked.write_text('{"prompt": "a"}\n')
    assert cli.main(["generate", str(tiny_folder[0]), "--prompt", "a", "--device", "cpu"]) == 130
    assert "stopped by Ctrl-C" in capsys.readouterr().err
    job = ["--input", str(asked), "--output", str(tmp_path / "out.jsonl"), "--device", "cpu"]
    assert cli.main(["generate", str(tiny_folder[0]), *job]) == 130
    assert "the same command goes on from there" in "".join(capsys.readouterr())


def test_what_a_failed_pass_ended_is_asked_again(tiny_folder, tmp_path, capsys, monkeypatch):
    """And only that: the line that was answered before is not."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "a", "temprature": 1}, *({"prompt": said, "max_tokens": 3} for said in ("The", "fox"))]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["generate", str(tiny_folder[0]), *SMALL, "--input", str(source), "--output", str(output)]
    given += ["--max_sequences", "1"]

    def open_to_fail(*args):
        opened = open_engine(*args)
        run, passes = opened.engine.runner.run, []

        def fails(*args, **more):
            passes.append(1)
            if len(passes) > 3:
                raise RuntimeError("out of memory")
            return run(*args, **more)

        opened.engine.runner.run = fails
        return opened

    monkeypatch.setattr("outcore.infer.commands.generate.open_engine", open_to_fail)
    assert cli.main(given) == 1 and not output.exists() and "out of memory" in capsys.readouterr().err
    monkeypatch.undo()
    assert cli.main(given) == 1 and "(2 from before, 1 failed), 3 tokens" in capsys.readouterr().err
    assert ["error" in json.loads(line) for line in output.read_text().splitlines()] == [True, False, False]


def test_a_journal_of_another_job_is_refused(tiny_folder, tmp_path, capsys):
    from outcore.infer.commands.journal import Journal

    journal = Journal(tmp_path / "out.jsonl", {"model": "another"})
    journal.add(0, {"text": "a"})
    write_lines(tmp_path / "in.jsonl", 2)
    given = [
        "generate", str(tiny_folder[0]), *SMALL, "--input", str(tmp_path / "in.jsonl"),
        "--output", str(tmp_path / "out.jsonl"),
    ]  # fmt: skip
    assert cli.main(given) == 2 and "in use" in capsys.readouterr().err
    journal.close()
    assert cli.main(given) == 2 and "model" in capsys.readouterr().err


def test_a_full_drive_is_named_and_loses_no_answer(tmp_path, monkeypatch):
    from outcore.infer.commands.journal import Journal

    journal, full = Journal(tmp_path / "out.jsonl", {"model": "m"}), OSError(errno.ENOSPC, "No space left on device")
    journal.add(0, {"text": "a"})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(full))
    refused(OSError, r"out\.jsonl .*the same command goes on.*: free space there", lambda: journal.finish(1))
    refused(OSError, r"out\.jsonl .*the same command goes on.*: free space there", journal.close)
    monkeypatch.undo()
    again = Journal(tmp_path / "out.jsonl", {"model": "m"})
    again.finish(1)
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"text": "a"}


@pytest.mark.parametrize("broken, output", [("", "out"), ("", "new/out"), ("out.journal", "out")])
def test_no_answer_is_noted_where_it_cannot_be_synced(tmp_path, monkeypatch, broken, output):
    from outcore.infer.commands.journal import Journal

    def sync(file):
        if os.readlink(f"/proc/self/fd/{file}") == str(tmp_path / broken):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.fsync", sync)
    for _ in range(2):  # what the first start left there is no sign that it is on the drive
        refused(OSError, "Input/output", lambda: Journal(tmp_path / output, {"model": "m"}))


def test_a_journal_whose_last_line_is_torn_goes_on_behind_the_line_before(tmp_path):
    from outcore.infer.commands.journal import Journal

    killed = Journal(tmp_path / "out.jsonl", {"model": "m"})
    killed.add(0, {"text": "a"})
    killed.close()
    with open(tmp_path / "out.jsonl.journal", "ab") as file:
        file.write(b"0a1b2c3d [1, ")
    again = Journal(tmp_path / "out.jsonl", {"model": "m"})
    again.add(1, {"text": "b"})
    again.finish(2)
    assert [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == ["a", "b"]


def test_a_journal_of_former_lines_is_kept_and_refused(tmp_path):
    from outcore.infer.commands.journal import JobError, Journal

    former = b'{"model": "m"}\n[0, "a", 1234]\n'
    (tmp_path / "out.jsonl.journal").write_bytes(former)
    refused(JobError, "format differs", lambda: Journal(tmp_path / "out.jsonl", {"model": "m"}))
    assert (tmp_path / "out.jsonl.journal").read_bytes() == former


def test_score(tiny_folder, tmp_path, capsys):
    folder, model, tokenizer = tiny_folder
    (tmp_path / "t.jsonl").write_text('{"text": "The quick brown fox"}\n{"text": "lazy dog. The dog"}\n')
    given = [
        "score", str(folder), *SMALL, "--input", str(tmp_path / "t.jsonl"), "--output", str(tmp_path / "o.jsonl"),
        "--token_logprobs",
    ]  # fmt: skip
    assert cli.main(given) == 0
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    ids = torch.tensor([tokenizer("The quick brown fox")["input_ids"]])
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert lines[0]["logprob"] == pytest.approx(-loss * (ids.shape[1] - 1), rel=1e-4)
    summary = json.loads(capsys.readouterr().out)
    assert summary["texts"] == 2 and summary["tokens"] == sum(len(line["token_logprobs"]) for line in lines)


def test_a_completion_is_scored_behind_its_prompt(tiny_folder, tmp_path, capsys):
    """As it bears loss in training: the prompt is read and not counted, a number is text."""
    folder, model, tokenizer = tiny_folder
    rows = [{"prompt": "The quick", "completion": " brown fox"}, {"question": 1, "prompt": "The dog is", "answer": 4}]
    rows += [{"prompt": "The lazy dog"}, {"prompt": "The lazy", "completion": None, "id": 7}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["score", str(folder), *SMALL, "--input", str(tmp_path / "t.jsonl"), "--output", str(tmp_path / "o.jsonl")]
    assert cli.main([*given, "--token_logprobs"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    for line, (asked, told) in zip(lines[:2], [("The quick", " brown fox"), ("The dog is", "4")], strict=True):
        before = tokenizer(asked)["input_ids"]
        after = tokenizer(told, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*before, *after]])).logits[0].log_softmax(-1)
        expected = [float(logits[len(before) - 1 + i, token]) for i, token in enumerate(after)]
        assert line["token_logprobs"] == pytest.approx(expected, abs=1e-4) and line["tokens"] == len(after)
    assert [line["tokens"] for line in lines[2:]] == [
        len(tokenizer(row["prompt"])["input_ids"]) - 1 for row in rows[2:]
    ]
    said = capsys.readouterr()
    assert json.loads(said.out)["tokens"] == sum(line["tokens"] for line in lines)
    assert "fields that are not read: 'question' (1 line), 'id' (1 line)" in said.err


def test_conversations_and_instructions_are_scored_where_they_bear_loss(tiny_folder, tmp_path, capsys):
    folder, _, tokenizer = tiny_folder
    talk = [{"role": "user", "content": "Add 1 to 3"}, {"role": "assistant", "content": "4"}]
    rows = [{"messages": talk}, {"instruction": "Add 1 to 3", "output": 4}, {"question": "The dog", "answer": " is"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["score", str(folder), *SMALL, "--input", str(tmp_path / "t.jsonl"), "--output", str(tmp_path / "o.jsonl")]
    assert cli.main([*given, "--token_logprobs"]) == 0
    chat, alpaca, pair = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    asked = tokenizer.apply_chat_template(talk[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(talk, return_dict=False)
    assert 0 < chat["tokens"] <= len(whole) - len(asked) and chat["logprob"] < 0
    assert alpaca["token_logprobs"] == chat["token_logprobs"]
    assert pair["tokens"] == len(tokenizer(" is", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(("row", "words"), [
    ({"text": "a", "prompt": "b"}, "has text and prompt, of which one would not count"),
    ({"text": "a", "completion": "b"}, "has text and completion, of which one"),
    ({"text": "a", "prompt": "b", "completion": "c"}, "has text and prompt and completion, of which one"),
    ({"prompt": "a", "completion": "b", "answer": "c"}, "has prompt and completion and answer, of which one"),
    ({"prompt": "a", "completion": ["b"]}, '"completion" should be text, found list'),
    ({"prompt": "a", "completion": ""}, 'its "completion" is empty'),
    ({"text": ["a"]}, '"text" should be text, found list'), ({"input_ids": [1, 2], "labels": [1, 2]}, 'has no "text"'),
    ({"messages": []}, "should hold a list of messages, found []"), ({"id": 3}, "its columns (id) have no known shape"),
    ({"instruction": "a", "output": ""}, "column 'output' is empty"), ([1], "is no JSON object or text"),
])  # fmt: skip
def test_a_line_of_which_a_part_would_not_count_is_not_scored(tiny_folder, tmp_path, capsys, row, words):
    (tmp_path / "t.jsonl").write_text(f'"The dog"\n{json.dumps(row)}\n')
    assert cli.main(["score", str(tiny_folder[0]), *SMALL, "--input", str(tmp_path / "t.jsonl")]) == 2
    told = capsys.readouterr().err
    assert "line 2: " in told and words in told


def test_what_cannot_be_scored_is_refused_before_anything_is(tiny_folder, tmp_path, capsys):
    source, output = tmp_path / "t.txt", tmp_path / "o.jsonl"
    given = ["score", str(tiny_folder[0]), *SMALL, "--input", str(source), "--output"]
    for text, target, words in (
        (b"The fox\n", source, "is the file of --input"),
        (b"The fox\n", tmp_path, "is a folder"),
        (b"The fox\n\xff\n", output, "line 2: is no UTF-8"),
        (b"The fox\n" + b"x" * 2000, output, "text 1 has 2000 tokens"),
    ):
        source.write_bytes(text)
        assert cli.main([*given, str(target)]) == 2 and words in capsys.readouterr().err
        assert source.read_bytes() == text and not output.exists()


def test_chat_stops_an_answer_and_goes_on(tiny_folder, tmp_path, capsys, monkeypatch):
    with closing(open_engine(str(tiny_folder[0]), InferSettings(context=256, ram_gib=1, page_tokens=8))) as opened:
        talk = Conversation(opened, {"max_tokens": 60, "temperature": 0, "ignore_eos": True}, "be brief")
        said = []
        submit = opened.engine.submit

        def interrupt(request, on_piece, on_answer):
            def piece(piece):
                said.append(piece.text)
                on_piece(piece)
                if len(said) == 5:
                    os.kill(os.getpid(), signal.SIGINT)

            submit(request, piece, on_answer)

        monkeypatch.setattr(opened.engine, "submit", interrupt)
        lines = iter(
            ["Hello", "And now?", "/stats", f"/save {tmp_path / 'talk.json'}", "/nonsense", "/reset", "/quit now"]
        )
        monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
        talk.run()
        out = capsys.readouterr()
        assert "(stopped)" in out.out and "tokens/s" in out.out and "unknown command /nonsense" in out.err
        saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
        assert [m["role"] for m in saved] == ["system", "user", "assistant", "user", "assistant"]
        assert opened.engine.num_running == 0 and talk.messages == []
        assert talk.last.timings.cached_tokens > 0  # the second turn found the first one's pages


def test_a_small_context_holds_a_conversation(tiny_folder, monkeypatch, capsys):
    lines = iter(["Hello", "x" * 2000, *["And now?"] * 5, "/reset", *["And now?"] * 5, "/stats", "/exit", "one more"])

    def read(prompt=""):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert cli.main(["chat", str(tiny_folder[0]), *SMALL, "--temperature", "0", "--max_tokens", "24"]) == 0
    said = capsys.readouterr()
    assert "this message alone takes 2,0" in said.err and "tokens at" in said.out
    assert said.err.count("oldest turns are left out") == 2, "once a conversation"
    assert list(lines) == ["one more"]


@pytest.mark.parametrize("shape", ["plain", "/v1/completions"])
def test_a_line_that_was_cancelled_says_so(shape):
    line = Line(0, shape, "a", Request("a", (1,), Sampling()))
    assert "was cancelled" in str(result_of(line, [Answer("a", 0, "half", (), "cancelled")], None, "tiny", 0)["error"])
