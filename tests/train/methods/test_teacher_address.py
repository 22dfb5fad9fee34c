"""A teacher behind an address: a stand-in with vLLM's routes and shapes."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore.monitor import read_metrics
from tests.hf.callers import tiny, tokenizer
from tests.train.methods.test_methods import ROWS, here, train  # noqa: F401

ANSWERS = [{"prompt": f"hello {i}", "completion": f" world {i} 1 2"} for i in range(12)]


class Teacher:
    """What the stand-in answers."""

    def __init__(self, model: Any) -> None:
        self.model, self.asked = model.eval(), list[dict[str, Any]]()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "big"}]}
        if path == "/tokenize":
            return {"tokens": tokenizer().encode(body["prompt"], add_special_tokens=False)}
        assert path == "/v1/completions" and body["model"] == "big" and body["max_tokens"] == 1
        self.asked.append(body)
        return {"choices": [{"index": 0, "text": "", "prompt_logprobs": self.told(body)}]}

    def told(self, body: dict[str, Any]) -> list[dict[str, Any] | None]:
        """The likeliest tokens of each place and the text's own one, by vLLM's docs."""
        ids, count = body["prompt"], body["prompt_logprobs"]
        with torch.no_grad():
            logprobs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        told: list[dict[str, Any] | None] = [None]
        for token, row in zip(ids[1:], logprobs, strict=False):
            order = row.argsort(descending=True).tolist()
            chosen = [*order[:count], *([token] if token not in order[:count] else [])]
            told.append({
                str(one): {"logprob": row[one].item(), "rank": order.index(one) + 1, "decoded_token": "?"}
                for one in reversed(chosen)
            })  # fmt: skip
        return told


@contextmanager
def answering(answer: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Iterator[str]:
    """The address of a server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            reply = json.dumps(answer(self.path, json.loads(self.rfile.read(length) or "{}"))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def losses(name: str) -> list[float]:
    return [step["loss"] for step in read_metrics(f"logs/{name}/metrics.jsonl").steps]


@pytest.mark.more
def test_a_student_learns_from_an_address_what_the_model_there_says() -> None:
    ROWS["distill"] = ANSWERS
    torch.manual_seed(5)
    big = tiny()
    for parameter in big.parameters():
        parameter.data.mul_(2.0)
    teacher = Teacher(big)
    with answering(teacher.answer) as address:
        assert train("distill", "--teacher", address, steps=12) == 0
        assert losses("run")[-1] < 0.8 * losses("run")[0]
        assert len(teacher.asked) == 12 and all(len(body["prompt"]) > 4 for body in teacher.asked)
        assert train("distill", "--teacher", address, steps=12, name="again") == 0
        assert len(teacher.asked) == 12 and losses("again") == losses("run")
    with answering(Teacher(tiny()).answer) as address:
        assert train("distill", "--teacher", address, steps=1, name="itself") == 0
    assert losses("itself")[0] < 1e-5


@pytest.mark.parametrize(
    ("path", "reply", "words"),
    [
        ("/tokenize", {"tokens": [1, 2]}, "has other tokens than the student"),
        ("/v1/completions", {"choices": [{"text": "x"}]}, "does not tell prompt_logprobs"),
    ],
)
def test_a_server_that_does_not_tell_is_refused(
    path: str, reply: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ROWS["distill"] = ANSWERS
    teacher = Teacher(tiny())
    with answering(lambda asked, body: reply if asked == path else teacher.answer(asked, body)) as address:
        assert train("distill", "--teacher", address, steps=1) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("left", [slice(1, None), slice(0, 3)], ids=["no own token", "fewer of one"])
def test_a_server_that_tells_too_little_of_one_token_is_refused(
    left: slice, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ROWS["distill"] = ANSWERS
    teacher, told = Teacher(tiny()), Teacher.told

    def too_little(self: Teacher, body: dict[str, Any]) -> list[dict[str, Any] | None]:
        *rows, last = told(self, body)
        own_first = sorted((last or {}).items(), key=lambda one: one[0] != str(body["prompt"][-1]))
        return [*rows, dict(own_first[left])]

    monkeypatch.setattr(Teacher, "told", too_little)
    with answering(teacher.answer) as address:
        assert train("distill", "--teacher", address, steps=1) == 2
    assert "does not tell prompt_logprobs of each token" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    ROWS["distill"] = ANSWERS
    assert train("distill", "--teacher", "http://127.0.0.1:9", steps=1) == 2
    assert "http://127.0.0.1:9/v1/models does not answer" in capsys.readouterr().err
    assert not list(Path("final_model").rglob("*.safetensors"))
