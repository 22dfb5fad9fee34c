"""Small endpoints: models, tokens, embeddings, health."""

from __future__ import annotations

import base64
import struct
from typing import Any

from outcore.apart import too_long_code
from outcore.infer.chats import CHAT_FIELDS, Chat, ChatError
from outcore.serve.body import sorted_out
from outcore.serve.completions import texts_of
from outcore.serve.errors import bad
from outcore.serve.service import Service

FIELDS = CHAT_FIELDS | {"prompt", "tokens", "add_special_tokens"}


def models(service: Service) -> dict[str, Any]:
    """GET /v1/models."""
    one = {
        "id": service.name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "outcore",
        "max_model_len": service.max_context,
    }
    return {"object": "list", "data": [one]}


def tokenize(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """POST /tokenize: a prompt or messages as token ids."""
    fields, _ = sorted_out(body, FIELDS, {})
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        raise bad("Give either prompt or messages.", "prompt")
    try:
        if messages is not None:
            ids = list(Chat(service.prompts, fields).ids)
        elif isinstance(prompt, str):
            special = fields.get("add_special_tokens", True) is not False
            (ids,) = service.prompts.ask("texts", [prompt], special)
        else:
            raise ValueError("prompt must be a text.")
    except ChatError as error:
        raise bad(str(error), error.field, error.code) from error
    except ValueError as error:
        raise bad(str(error), "prompt", too_long_code(error)) from error
    return {"tokens": ids, "count": len(ids), "max_model_len": service.max_context}


def detokenize(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """POST /detokenize: token ids as text."""
    tokens = body.get("tokens")
    vocab = service.opened.engine.speech.vocab_size
    if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < vocab for t in tokens):
        raise bad(f"tokens must be a list of ids from 0 to {vocab - 1}.", "tokens")
    return {"prompt": service.prompts.ask("decoded", tokens)}


def health(service: Service) -> tuple[int, dict[str, Any]]:
    """GET /health: 200 while passes run, 503 after they failed."""
    engine = service.opened.engine
    found = {
        "status": "ok" if service.thread.is_well else "failed",
        "running": engine.num_running,
        "waiting": engine.num_waiting,
    }
    return (200 if service.thread.is_well else 503), found


EMBEDDING_FIELDS = frozenset({"input", "encoding_format"})
EMBEDDING_UNSUPPORTED: dict[str, Any] = {"dimensions": None}


class EmbeddingCall:
    """One request, understood. ApiError for what cannot be."""

    is_stream = False

    def __init__(self, service: Service, body: dict[str, Any]) -> None:
        fields, self.ignored = sorted_out(body, EMBEDDING_FIELDS, EMBEDDING_UNSUPPORTED)
        self.service = service
        service.check_model(fields)
        self.texts = texts_of(fields.get("input"), "input", service)
        self.encoding = fields.get("encoding_format") or "float"
        if self.encoding not in ("float", "base64"):
            raise bad("encoding_format must be float or base64.", "encoding_format")
        try:
            service.opened.engine.check_texts(self.texts)
        except ValueError as error:
            raise bad(str(error), "input", "context_length_exceeded") from error


async def embedded(call: EmbeddingCall) -> dict[str, Any]:
    """All vectors at once."""
    vectors = await call.service.thread.embed(call.texts)
    data = []
    for index, vector in enumerate(vectors):
        values: Any = vector.tolist()
        if call.encoding == "base64":
            values = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        data.append({"object": "embedding", "index": index, "embedding": values})
    tokens = sum(map(len, call.texts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": call.service.name, "usage": usage}
