"""Conversations kept on disk and answered by the loaded model: what was written stays, however an answer ends."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

import httpx

from outcore.common import read_object
from outcore.serve.additions import ApiError, bad
from outcore.ui.api.model import LOOK_EVERY_S, ModelHost, StillLoading
from outcore.ui.api.place import Place, write_json

_ID = re.compile(r"^chat-[0-9a-f]{12}$")
SAVE_EVERY_S = 2.0
UNDER_WAY = "An answer is being written in this conversation: stop it first."
TITLE_CHARS = 60
ANSWER_TOKENS = 512
"""Room for an answer that is kept free in the context, but no more than a quarter of it."""
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "max_tokens", "seed", "stop",
)  # fmt: skip


class Running:
    """An answer that is being written. Whoever watches gets its latest state, from whatever moment on."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._latest: dict[str, Any] = {"event": "piece", "content": "", "reasoning": ""}
        self._changed = asyncio.Event()

    def tell(self, event: str, **more: Any) -> None:
        """Pass on a new state."""
        self._latest = {"event": event, **more}
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def watch(self) -> AsyncGenerator[dict[str, str], None]:
        """Yield states until the last one, `done` or `error`; who is slow misses some in between."""
        while True:
            latest, changed = self._latest, self._changed
            yield {"data": json.dumps(latest)}
            if latest["event"] in ("done", "error"):
                return
            await changed.wait()

    def stop(self) -> None:
        """End it, from any thread."""
        self._loop.call_soon_threadsafe(self.task.cancel)


class Conversations:
    """Conversations kept on disk. A conversation: id, title, system, sampling, messages, draft (what was asked last,
    where it was refused); a message: role, content, and of an answer reasoning, finish, timings, model, left_out (so
    many of the oldest messages were not sent)."""

    def __init__(self, place: Place, host: ModelHost) -> None:
        self.place, self.host = place, host
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), trust_env=False)
        self._running: dict[str, Running] = {}
        self._lock = threading.Lock()  # one at a time reads a conversation, changes it and writes it

    def all(self, search: str = "") -> list[dict[str, Any]]:
        """The latest first, without their messages; `search`: those in which these words stand."""
        found = [read_object(path) for path in self._folder.glob("chat-*.json")]
        found = [one for one in found if one and search.casefold() in _words(one)]
        found = [{k: v for k, v in one.items() if k != "messages"} | {"turns": _turns(one)} for one in found]
        return sorted(found, key=lambda one: -one["changed_at"])

    def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A new one."""
        now = time.time()
        one = {"id": f"chat-{uuid.uuid4().hex[:12]}", "title": "", "created_at": now, "system": "", "sampling": {}}
        return self._save(one | {"messages": []} | _told(body))

    def get(self, name: str) -> dict[str, Any]:
        """One with its messages; 404 when there is none."""
        is_under_way = name in self._running  # asked before reading: what the answer kept last is in the file then
        one = read_object(self._folder / f"{name}.json") if _ID.match(name) else {}
        if not one:
            raise ApiError(404, f"There is no conversation {name!r}.", param="id")
        return one | {"is_under_way": is_under_way}

    def change(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Another title, system prompt or sampling."""
        told = _told(body)
        with self._lock:
            return self._save(self.get(name) | told)

    def remove(self, name: str) -> dict[str, Any]:
        """Forget one, with the answer that is being written in it."""
        self.stop(name)
        with self._lock:
            self.get(name)
            (self._folder / f"{name}.json").unlink()
        return {"id": name, "deleted": True}

    def export(self, name: str, form: str) -> tuple[str, str]:
        """(text, media type): json as chat data that can be trained on, or Markdown."""
        one = self.get(name)
        messages = _sent(one)
        if form == "json":
            return json.dumps({"messages": messages}, ensure_ascii=False) + "\n", "application/json"
        if form != "md":
            raise bad("format must be json or md.", "format")
        return "\n\n".join(f"**{m['role']}**\n\n{m['content']}" for m in messages) + "\n", "text/markdown"

    def prepare(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take a user's message (or, with `regenerate`, the last one again; with `at`, in place of that message and
        what followed) into the conversation, before anything is answered. ApiError for what cannot be."""
        with self._lock:
            return self._prepared(self.get(name), body)

    def begin(self, one: dict[str, Any]) -> Running:
        """Begin to answer a prepared conversation. The answer goes on when whoever asked for it goes away."""
        if one["id"] in self._running:  # both were asked for before the first began
            raise ApiError(409, UNDER_WAY, code="under_way")
        running = self._running[one["id"]] = Running()
        running.task = asyncio.create_task(self._write(one, running))
        return running

    def running(self, name: str) -> Running:
        """The answer that is being written in this conversation; 404 where there is none."""
        if name not in self._running:
            raise ApiError(404, "No answer is being written in this conversation.", param="id")
        return self._running[name]

    def stop(self, name: str) -> dict[str, Any]:
        """End the answer that is being written, if any; what was written is kept."""
        running = self._running.get(name)
        if running is not None:
            running.stop()
        return {"id": name, "stopped": running is not None}

    # --- parts

    async def _write(self, one: dict[str, Any], running: Running) -> None:
        """Answer and keep the answer. Tells pieces, then the message as it was kept, or an error."""
        began_s = saved_s = time.monotonic()
        said: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": "", "finish": "cancelled"}
        times: dict[str, Any] = {"first_s": None, "usage": {}, "pieces": 0}
        messages, error, draft = list(one["messages"]), "", ""
        try:
            said["left_out"] = await self._left_out(one, running)
            began_s = time.monotonic()  # what the model's loading took is no part of its answer
            async for chunk in self._chunks(one, said["left_out"], running):
                if "error" in chunk:
                    said["finish"], error = "error", chunk["error"]["message"]
                    break
                times["usage"] = chunk.get("usage") or times["usage"]
                for choice in chunk.get("choices", []):
                    delta = choice["delta"]
                    said["content"] += delta.get("content") or ""
                    said["reasoning"] += delta.get("reasoning_content") or ""
                    said["finish"] = choice["finish_reason"] or said["finish"]
                    if delta.get("content") or delta.get("reasoning_content"):
                        times["first_s"] = times["first_s"] or time.monotonic() - began_s
                        times["pieces"] += 1
                        running.tell("piece", **{name: said[name] for name in ("content", "reasoning", "left_out")})
                if time.monotonic() - saved_s > SAVE_EVERY_S:
                    saved_s = time.monotonic()
                    self._keep(one["id"], [*messages, said])
        except asyncio.CancelledError:
            said["finish"] = "cancelled"  # by `stop`: what was written so far is the answer
        except OSError as full:
            said["finish"], error = "error", f"The answer cannot be kept: {full.strerror or full}."
        finally:
            said["timings"] = _timings(times, time.monotonic() - began_s)
            try:
                if said["finish"] != "error":
                    said["timings"] |= await asyncio.to_thread(self.host.residency)
                    said["model"] = self.host.state().get("model")
                if said["content"] or said["reasoning"]:
                    self._keep(one["id"], [*messages, said])
                elif error:  # nothing was answered: as it was before, with what was asked as a draft
                    draft = one["asked"]
                    self._keep(one["id"], one["before"], draft=draft)
            finally:  # told when it is kept: who reads it may ask on at once
                del self._running[one["id"]]
                if error:
                    running.tell("error", message=error, **({"draft": draft} if draft else {}))
                else:
                    running.tell("done", message=said)

    @property
    def _folder(self):
        return self.place.of("conversations")

    def _prepared(self, one: dict[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
        if one.pop("is_under_way"):
            raise ApiError(409, UNDER_WAY, code="under_way")
        with suppress(StillLoading):  # then the answer waits
            self.host.address()
        messages, text, at = one["messages"], body.get("text"), body.get("at")
        before = {"before": list(messages), "asked": text}
        if body.get("regenerate"):
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            if not messages:
                raise bad("There is nothing to answer again.", "regenerate")
            return self._save(one) | before | {"asked": one.get("draft", "")}
        if not isinstance(text, str) or not text.strip():
            raise bad("text must say something.", "text")
        if at is not None:
            if not isinstance(at, int) or not 0 <= at < len(messages) or messages[at]["role"] != "user":
                raise bad("at must be the number of one of the user's messages.", "at")
            del messages[at:]
        messages.append({"role": "user", "content": text})
        one["title"] = one["title"] or " ".join(text.split())[:TITLE_CHARS]
        return self._save(one | {"draft": ""}) | before

    def _keep(self, name: str, messages: list[dict[str, Any]], **more: str) -> None:
        """Write what an answer said so far; settings that changed meanwhile stay, a conversation removed stays so."""
        with self._lock:
            if one := read_object(self._folder / f"{name}.json"):
                self._save(one | {"messages": messages} | more)

    def _save(self, one: dict[str, Any]) -> dict[str, Any]:
        one = {k: v for k, v in one.items() if k != "is_under_way" and (k, v) != ("draft", "")}
        one |= {"changed_at": time.time()}
        write_json(self._folder / f"{one['id']}.json", one)
        return one

    async def _address(self, running: Running) -> tuple[str, dict[str, str]]:
        """The model's server, as soon as the model is loaded."""
        while True:
            try:
                return await asyncio.to_thread(self.host.address)
            except StillLoading as error:
                running.tell("waiting", message=f"{error} The answer follows by itself.")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _left_out(self, one: Mapping[str, Any], running: Running) -> int:
        """Count the oldest messages that are not sent, so that the rest and an answer are within the context. Where
        they must be more, half of the context becomes free: the next questions then begin alike, and cost less."""
        turns = [index for index, message in enumerate(one["messages"]) if message["role"] == "user"]
        with suppress(httpx.HTTPError, ValueError, ApiError):  # told by the answer itself
            base, headers = await self._address(running)

            async def fits(left_out: int, share: float = 1.0) -> bool:
                body = {"messages": _sent(one, left_out)}
                answer = await self._client.post(f"{base}/tokenize", json=body, headers=headers)
                found = answer.json()
                if answer.status_code != 200:  # too long even to be counted, or it counts nothing
                    return (found.get("error") or {}).get("code") != "context_length_exceeded"
                most = found["max_model_len"]
                room = one["sampling"].get("max_tokens") or min(ANSWER_TOKENS, most // 4)
                return found["count"] + room <= share * most

            before = max((message.get("left_out", 0) for message in one["messages"]), default=0)
            for left_out in dict.fromkeys((0, before)):
                if await fits(left_out):
                    return left_out
            low, high = 0, len(turns) - 1
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if await fits(turns[middle], 0.5) else (middle + 1, high)
            return turns[high]
        return 0

    async def _chunks(
        self, one: Mapping[str, Any], left_out: int, running: Running
    ) -> AsyncGenerator[dict[str, Any], None]:
        body = {"messages": _sent(one, left_out), "stream": True, "stream_options": {"include_usage": True}}
        body |= one["sampling"]
        broken, is_whole = "The model's server broke off; what it wrote is kept.", False
        try:
            base, headers = await self._address(running)
            url = f"{base}/v1/chat/completions"
            async with self._client.stream("POST", url, json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    yield json.loads(await answer.aread())
                    return
                async for line in answer.aiter_lines():
                    data = line.removeprefix("data: ")
                    is_whole = is_whole or data == "[DONE]"
                    if line.startswith("data: ") and data != "[DONE]":
                        yield json.loads(data)
        except (httpx.HTTPError, ValueError, ApiError) as error:
            broken = str(error) if isinstance(error, ApiError) else broken
        if not is_whole:
            yield {"error": {"message": broken}}


def _sent(one: Mapping[str, Any], left_out: int = 0) -> list[dict[str, str]]:
    """A conversation as a model reads it, without so many of its oldest messages."""
    system = [{"role": "system", "content": one["system"]}] if one["system"] else []
    return system + [{"role": m["role"], "content": m["content"]} for m in one["messages"][left_out:]]


def _words(one: Mapping[str, Any]) -> str:
    """Everything that can be searched for in a conversation."""
    return "\n".join([one["title"], *(message["content"] for message in one["messages"])]).casefold()


def _told(body: Mapping[str, Any]) -> dict[str, Any]:
    """Title, system prompt and sampling of a body. ApiError for what is none."""
    unknown = sorted(set(body) - {"title", "system", "sampling"})
    if unknown:
        raise bad(f"{unknown[0]} is nothing that a conversation has.", unknown[0])
    for name in ("title", "system"):
        if not isinstance(body.get(name, ""), str):
            raise bad(f"{name} must be a text.", name)
    sampling = body.get("sampling", {})
    if not isinstance(sampling, Mapping) or set(sampling) - set(SAMPLING):
        raise bad(f"sampling may say {', '.join(SAMPLING)}.", "sampling")
    found = {name: body[name] for name in ("title", "system") if name in body}
    if "sampling" in body:
        found["sampling"] = {name: value for name, value in sampling.items() if value is not None}
    return found


def _turns(one: Mapping[str, Any]) -> int:
    return sum(message["role"] == "user" for message in one.get("messages", []))


def _timings(times: Mapping[str, Any], total_s: float) -> dict[str, Any]:
    """Compute an answer's times: seconds to its first word, tokens per second after it, share of cached prompt
    tokens."""
    usage = times["usage"]
    prompt, tokens = usage.get("prompt_tokens"), usage.get("completion_tokens") or times["pieces"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    first_s = times["first_s"]
    decode_s = total_s - first_s if first_s is not None else 0.0
    return {
        "prefill_s": first_s,
        "decode_s": decode_s,
        "total_s": total_s,
        "tokens": tokens,
        "tokens_per_s": (tokens - 1) / decode_s if tokens > 1 and decode_s > 0 else None,
        "prompt_tokens": prompt,
        "hit_rate": cached / prompt if prompt else None,
    }
