"""All routes of server and panels, as OpenAPI lists them, asked for nonsense: no answer has status 500."""

import json
import random
import re
import sys
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("lm_eval")

from starlette.testclient import TestClient

from outcore.config import FIELDS
from outcore.evaluate.http import with_evaluations
from outcore.evaluate.settings import EvaluationSettings
from outcore.evaluate.tasks import harness_version
from outcore.serve import ServeSettings
from outcore.ui.api import PanelsApi, Place
from outcore.ui.api import children as children_module
from outcore.ui.api import model as model_module
from outcore.ui.app import create_app
from outcore.ui.settings import UiSettings
from tests.serve.running import Running

pytestmark = pytest.mark.usefixtures("one_thread")
VALUES = [
    None, True, False, 0, -1, 1, 3, 1e308, -0.5, float("nan"), float("inf"), 10**30, 10**400, "", " ", "x", "\0", "é🙂",
    "-1", "--help", "../../x", "/etc/passwd", "a" * 3000, [], [None], ["x"], [["x"]], [{}], {}, {"a": {"b": [1]}},
    {"type": "x"}, {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}, [{"role": "user", "content": "x"}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"type": "function", "function": {}}], "1e400", [1, 2], "auto",
    [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}],
    [{"type": "namespace", "name": "x", "tools": [{"type": "namespace"}]}], [{"name": "x", "input_schema": {}}],
    [{"type": "function_call_output", "call_id": 3}], [{"type": "function_call", "name": []}], {"type": "tool"},
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [3]}]}], {"type": "any"},
    [{"role": "assistant", "content": [{"type": "tool_use", "input": []}, {"type": "thinking"}]}],
    {"format": {"type": "json_schema", "name": 3}}, {"type": "enabled", "budget_tokens": "x"},
    "nan", [{"type": "custom", "name": "x", "more": 10**400}], [{"type": "custom", "name": "x", "more": float("nan")}],
]  # fmt: skip
NAMES = ["x", "a b", "..", ".", "%", "é🙂", "-x", "a" * 300, "a\nb", "file-" + "0" * 32, "chat-000000000000", "\0"]
BODIES = [b"", b"{", b"[]", b"null", b'"x"', b"[" * 20000, b'{"a":' * 3000, b"\xff\xfe", b'{"a": "\\ud800"}', b"{}"]
OF_ANSWERS = (
    "model", "messages", "prompt", "input", "n", "stream", "stream_options", "max_tokens", "temperature", "top_p",
    "stop", "top_k", "seed", "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice", "parallel_tool_calls",
    "response_format", "chat_template_kwargs", "echo", "encoding_format", "tokens", "instructions", "metadata",
    "suffix", "endpoint", "input_file_id", "completion_window", "min_tokens", "stop_token_ids", "best_of", "text",
    "reasoning", "system", "thinking", "stop_sequences", "output_config", "previous_response_id", "truncation",
    "include", "store", "max_output_tokens", "query", "documents", "top_n", "lora", "continue_final_message",
    "add_generation_prompt", "guided_json",
)  # fmt: skip
OF_PANELS = (
    "model", "fields", "rows", "path", "needed_gb", "at_once", "merge", "title", "system", "sampling", "text", "at",
    "regenerate", *model_module.FIELDS, *model_module.DEGREES, "gpu_temp_c", "swap_used_gib",
)  # fmt: skip
OF_EVALUATIONS = tuple(EvaluationSettings.__dataclass_fields__)


def index_in(logs: Path) -> None:
    """Write what is known of the harness's tasks: finding it takes half a minute."""
    known = logs / "evaluations" / "task_names.json"
    known.parent.mkdir(parents=True)
    known.write_text(json.dumps({"version": harness_version(), "names": []}))


def fuzz(client, schema: dict, names: tuple[str, ...], count: int, seed: int) -> dict[str, str]:
    """`count` requests of each route; those with status 500, by route."""
    draw, failed = random.Random(seed), {}
    usual = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi", "max_tokens": 1}

    def body_of() -> bytes:
        if draw.random() < 0.15:
            return draw.choice(BODIES)
        body = {name: value for name, value in usual.items() if name in names and draw.random() < 0.8}
        body |= {name: draw.choice(VALUES) for name in draw.sample(names, draw.randint(1, 3))}
        if "fields" in names and draw.random() < 0.6:
            body["fields"] = {name: draw.choice(VALUES) for name in draw.sample(list(FIELDS), draw.randint(1, 3))}
        return json.dumps(body).encode()

    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            asked = route.get("parameters", [])
            for _ in range(count if "preview" not in path else count // 20):  # which trains a tokenizer
                where = re.sub(r"\{.*?\}", lambda _: quote(draw.choice(NAMES), safe=""), path)
                query = {one["name"]: str(draw.choice(VALUES))[:200] for one in asked if one["in"] == "query"}
                sent = body_of() if method in ("post", "put", "patch") else b""
                answer = client.request(
                    method.upper(), where, params=query, content=sent, headers={"Content-Type": "application/json"}
                )
                if answer.status_code == 500:
                    failed.setdefault(f"{method} {path}", f"{where} {query} {sent[:300]!r}: {answer.text[:200]}")
    return failed


@pytest.mark.parametrize(
    "count", [4, pytest.param(20, marks=pytest.mark.more), pytest.param(100, marks=pytest.mark.slow)]
)
def test_the_panels_answer_nonsense_in_words(tmp_path, monkeypatch, count):
    monkeypatch.chdir(tmp_path)
    index_in(tmp_path / "logs")
    monkeypatch.setattr(children_module, "PROGRAM", (sys.executable, "-c", "pass"))
    app = create_app(UiSettings(), PanelsApi(Place()), with_panels=False)
    with TestClient(app, base_url="http://127.0.0.1:7860", raise_server_exceptions=False) as client:
        assert not fuzz(client, app.openapi(), (*OF_PANELS, *OF_EVALUATIONS), count, seed=count)


@pytest.mark.parametrize(
    "count", [4, pytest.param(16, marks=pytest.mark.more), pytest.param(52, marks=pytest.mark.slow)]
)
def test_the_server_answers_nonsense_in_words(tiny_folder, tmp_path, count):
    settings = ServeSettings(logs=tmp_path / "logs" / "serve", name="tiny", max_answer_tokens=8)
    index_in(tmp_path / "logs")
    server = Running(tiny_folder[0], settings, with_evaluations)
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            assert not fuzz(client, server.app.openapi(), (*OF_ANSWERS, *OF_EVALUATIONS), count, seed=count)
            assert client.get("/health").json()["status"] == "ok"
    finally:
        server.stop()
