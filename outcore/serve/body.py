"""Bodies of requests: read within limits, known fields kept, unknown ones named, unsupported ones refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from outcore.common.files import json_of
from outcore.infer.requests import KNOWN
from outcore.serve.errors import ApiError, bad, gone

HARMLESS = frozenset({"model", "n", "stream", "stream_options", "user", "metadata", "store", "safety_identifier"})
"""Fields that every endpoint takes; some of them change nothing here, as they change nothing in an answer."""
IGNORED_HEADER = "X-Outcore-Ignored-Fields"
MOST_HEADER_LETTERS = 4096
MOST_PAIRS, MOST_NAME, MOST_VALUE = 16, 64, 512
"""Texts of metadata, and letters of their names and of each, as OpenAI has it: they are said again with each answer."""
MAX_PARTS, MAX_VALUES = 400_000, 1_000_000
"""Signs of lists, objects and names in a body, and of values: a hundred thousand messages, or a million token ids."""


async def read_body(http: HttpRequest, max_bytes: int, *, may_lack: bool = False) -> dict[str, Any]:
    """The JSON object that was sent; {} for no body at all, where it `may_lack`. ApiError for one that is too long or
    none."""
    data = await read_bytes(http, max_bytes)
    return {} if may_lack and not data else object_of(data)


def object_of(data: bytes) -> dict[str, Any]:
    """The JSON object that these bytes are. ApiError for another thing, and for one that would take seconds to read,
    in which no other client is served."""
    if sum(map(data.count, (b"{", b"[", b'":'))) > MAX_PARTS or data.count(b",") > MAX_VALUES:
        raise bad(f"The body holds more than {MAX_PARTS:,} lists, objects and names, or {MAX_VALUES:,} values.")
    try:
        body = json_of(data)
    except ValueError as error:
        raise bad(f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise bad("The body must be a JSON object.")
    return body


async def read_bytes(http: HttpRequest, max_bytes: int) -> bytes:
    """All that was sent. ApiError for more than `max_bytes`."""
    data = bytearray()
    try:
        async for chunk in http.stream():
            data += chunk
            if len(data) > max_bytes:
                raise ApiError(413, f"The body is longer than {max_bytes} bytes, which this server takes at most.")
    except ClientDisconnect:
        raise gone() from None
    return bytes(data)


def sorted_out(body: Mapping[str, Any], own: frozenset[str], unsupported: Mapping[str, Any]) -> tuple[dict, list[str]]:
    """(fields that are known, names of the others). `unsupported`: field -> the one value that means nothing; another
    one is refused."""
    for name, neutral in unsupported.items():
        value = body.get(name, neutral)
        if value is not None and value != neutral:
            raise bad(f"{name} is not supported by this server.", name, "unsupported_parameter")
    known = own | KNOWN | HARMLESS | unsupported.keys()
    return {k: v for k, v in body.items() if k in known}, sorted(k for k in body if k not in known)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names what was ignored; none for nothing. Names are the client's own texts: letters that no
    header may hold are escaped, and a long list is cut."""
    text = ", ".join(names)[:MOST_HEADER_LETTERS].encode("unicode_escape").decode("ascii")[:MOST_HEADER_LETTERS]
    return {IGNORED_HEADER: text.strip()} if names else {}


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad(f"{name} must be true or false.", name)
    return value


def metadata_of(body: Mapping[str, Any]) -> dict[str, str] | None:
    """Texts by name that a client has kept beside what it asks for. ApiError for what is none, and for too much."""
    found = body.get("metadata")
    if found is None or (
        isinstance(found, dict)
        and len(found) <= MOST_PAIRS
        and all(isinstance(v, str) and len(k) <= MOST_NAME and len(v) <= MOST_VALUE for k, v in found.items())
    ):
        return found
    limits = f"{MOST_PAIRS} texts at most, names of {MOST_NAME} letters, values of {MOST_VALUE}"
    raise bad(f"metadata must be an object: {limits}.", "metadata")


def wants_usage(body: Mapping[str, Any]) -> Literal["never", "end", "always"]:
    """Whether a stream ends with what it cost, or tells in each piece what it has cost so far."""
    if (options := body.get("stream_options")) is None:
        return "never"
    if not isinstance(options, Mapping):
        raise bad("stream_options must be an object.", "stream_options")
    if not body.get("stream"):
        raise bad("stream_options is only for stream: true.", "stream_options")
    if not flag(options, "include_usage"):
        return "never"
    return "always" if flag(options, "continuous_usage_stats") else "end"


def usage_of(prompt_tokens: int, answer_tokens: int, cached: int = 0) -> dict[str, Any]:
    """Make the `usage` of an answer: tokens of the prompt, of the answer, and those that came from the cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
