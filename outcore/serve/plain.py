"""Small endpoints: models, tokens, health, embeddings; by a model whose head classifies also labels of texts, and
documents in the order of a query."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from outcore.apart import too_long_code
from outcore.infer.chats import CHAT_FIELDS, Chat, ChatError
from outcore.serve.body import sorted_out
from outcore.serve.completions import texts_of
from outcore.serve.errors import bad
from outcore.serve.models import Models
from outcore.serve.service import Service

FIELDS = CHAT_FIELDS | {"prompt", "tokens", "add_special_tokens"}


def listed(models: Models) -> dict[str, Any]:
    """GET /v1/models."""
    data = [described(models, name) for name in models.named]
    ends = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    views = [(name, base.views[name]) for name, base in models.named.items() if base.views]
    catalogue = [_of_catalogue(name, of.max_context, of.opened.found.pictures is not None) for name, of in views]
    return {"object": "list", "data": data, **ends, "models": catalogue}


def described(models: Models, name: str) -> dict[str, Any]:
    """One model of them. How long its context is, is known while it is loaded."""
    base, first = models.named[name], models.first
    found = {
        "id": name,
        "object": "model",
        "created": first.started_s,
        "owned_by": "outcore",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(first.started_s, UTC).isoformat(),
        "state": base.state,
    }
    if base.views:
        context = base.views[name].max_context
        found |= dict.fromkeys(("max_model_len", "context_length", "max_input_tokens"), context)
        found["max_tokens"] = min(context, first.settings.max_answer_tokens)
    return found | ({"error": base.error} if base.error else {})


def _of_catalogue(name: str, context: int, sees: bool) -> dict[str, Any]:
    """Entry of the catalogue that Codex reads: which tools it gives a model, and when it shortens a conversation."""
    return {
        "slug": name,
        "display_name": name,
        "description": "A model on this machine",
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": "",
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "tokens", "limit": max(1000, context // 8)},
        "supports_parallel_tool_calls": True,
        "context_window": context,
        "effective_context_window_percent": 90,
        "experimental_supported_tools": [],
        "input_modalities": ["text", "image"] if sees else ["text"],
    }


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


EMBEDDING_FIELDS = frozenset({"input", "encoding_format", "dimensions"})


class TextsCall:
    """A request about texts that are read and nothing else. ApiError for what cannot be."""

    is_stream, places = False, 1
    texts: list[tuple[int, ...]]

    def __init__(
        self, service: Service, body: dict[str, Any], known: frozenset[str], unsupported: Mapping[str, Any]
    ) -> None:
        self.fields, self.ignored = sorted_out(body, known, unsupported)
        self.service, self.labels = service, service.opened.engine.speech.labels
        service.check_model(self.fields)
        service.check_whole()

    def check_texts(self, field: str) -> None:
        """ApiError, naming the field, for texts that do not fit."""
        try:
            self.service.opened.engine.check_texts(self.texts)
        except ValueError as error:
            raise bad(str(error), field, "context_length_exceeded") from error

    def usage(self) -> dict[str, int]:
        """Tokens that were read."""
        tokens = sum(map(len, self.texts))
        return {"prompt_tokens": tokens, "total_tokens": tokens}


class EmbeddingCall(TextsCall):
    """POST /v1/embeddings."""

    def __init__(self, service: Service, body: dict[str, Any]) -> None:
        super().__init__(service, body, EMBEDDING_FIELDS, {})
        self.texts = texts_of(self.fields.get("input"), "input", service)
        self.encoding = self.fields.get("encoding_format") or "float"
        if self.encoding not in ("float", "base64"):
            raise bad("encoding_format must be float or base64.", "encoding_format")
        self.dimensions = self.fields.get("dimensions")
        sizes = getattr(service.opened.found.loaded.config, "matryoshka_dimensions", None) or ()
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions not in sizes):
            which = f"may be cut to {', '.join(map(str, sizes))}" if sizes else "were not trained to be cut"
            raise bad(f"dimensions is {self.dimensions!r}, but this model's vectors {which}.", "dimensions")
        self.check_texts("input")


async def embedded(call: EmbeddingCall) -> dict[str, Any]:
    """All vectors at once."""
    vectors = await call.service.thread.embed(call.texts)
    data = []
    for index, vector in enumerate(vectors):
        cut = vector[: call.dimensions]
        values: Any = (cut / cut.norm()).tolist()
        if call.encoding == "base64":
            values = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        data.append({"object": "embedding", "index": index, "embedding": values})
    return {"object": "list", "data": data, "model": call.service.name, "usage": call.usage()}


CLASSIFY_FIELDS = frozenset({"input"})
RERANK_FIELDS = frozenset({"query", "documents", "top_n", "return_documents"})


class LabelCall(TextsCall):
    """A request for labels, of a model that has some."""

    def __init__(self, service: Service, body: dict[str, Any], known: frozenset[str]) -> None:
        super().__init__(service, body, known, {})
        if self.labels is None:
            raise bad("This model writes text and has no labels. Serve one whose head classifies texts.", "model")

    async def scored(self) -> list[list[float]]:
        """Compute the probability of each label for each text."""
        assert self.labels is not None
        return [self.labels.probabilities(found) for found in await self.service.thread.label(self.texts)]


class ClassifyCall(LabelCall):
    """POST /classify, in vLLM's shape."""

    def __init__(self, service: Service, body: dict[str, Any]) -> None:
        super().__init__(service, body, CLASSIFY_FIELDS)
        self.texts = texts_of(self.fields.get("input"), "input", service)
        self.check_texts("input")


class RerankCall(LabelCall):
    """POST /v1/rerank, in Jina's and Cohere's shape."""

    def __init__(self, service: Service, body: dict[str, Any]) -> None:
        super().__init__(service, body, RERANK_FIELDS)
        query, documents, top_n = (self.fields.get(name) for name in ("query", "documents", "top_n"))
        if not isinstance(query, str):
            raise bad("query must be a text.", "query")
        given = documents if isinstance(documents, list) else []
        found = [one.get("text") if isinstance(one, dict) else one for one in given]
        texts = [one for one in found if isinstance(one, str)]
        if not found or len(texts) < len(found):
            raise bad('documents must be a list of texts, or of {"text": ...}.', "documents")
        if top_n is not None and (type(top_n) is not int or top_n < 1):
            raise bad(f"top_n is {top_n!r}, but must be a whole number from 1.", "top_n")
        assert self.labels is not None
        if (count := len(self.labels.names)) != 1:
            raise bad(f"This model tells {count} labels apart; one that reranks has one.", "model")
        self.documents, self.top_n = texts, top_n
        self.returns = self.fields.get("return_documents") is not False
        self.texts = service.prompts.of_pairs(query, texts)
        self.check_texts("documents")


async def classified(call: ClassifyCall) -> dict[str, Any]:
    """Labels of all texts."""
    assert call.labels is not None
    data = []
    for index, probs in enumerate(await call.scored()):
        label = call.labels.names[probs.index(max(probs))]
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
    frame = call.service.frame(call.service.new_name("classify"), "list")
    return frame | {"data": data, "usage": call.usage()}


async def reranked(call: RerankCall) -> dict[str, Any]:
    """Documents by their relevance, the best first."""
    scores = [score for (score,) in await call.scored()]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: call.top_n]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": call.documents[index]}} if call.returns else {})
        for index in order
    ]
    return {
        "id": call.service.new_name("rerank"),
        "model": call.service.name,
        "results": results,
        "usage": call.usage(),
    }
