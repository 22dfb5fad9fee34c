"""Models of a server by name: the one that it was started with, adapters beside their base, and others, which are
opened when they are asked for, and closed when nobody has asked for a while or another needs their room.

Adapters of one base share its engine and its passes. The first model stays. Lives on the server's event loop; models
are opened and closed on threads beside it, one at a time."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from outcore.common.quantities import GIB
from outcore.infer.opening import InferSettings, OpenedModel, find_place
from outcore.serve.errors import ApiError, stops
from outcore.serve.service import Service
from outcore.sizing.inference import DoesNotFit

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Base:
    """A model and the adapters beside it: what one engine answers for."""

    place: str
    """Model as `open_engine` takes it: a folder, a file or a hub id."""
    key: tuple[str, ...] | None
    """Tells whose adapters these could be; None: it takes none."""
    names: dict[str, int] = field(default_factory=dict)
    """Number of the adapter by the name under which it is served; 0 is the model itself."""
    adapters: tuple[str, ...] = ()
    views: dict[str, Service] = field(default_factory=dict)
    """Services by name, which share one engine; empty while it is closed."""
    loading: asyncio.Task[None] | None = None
    num_waiting: int = 0
    """Requests that wait for it, or are being understood."""
    used_s: float = 0.0
    timer: asyncio.TimerHandle | None = None
    """Looks whether it is still asked for."""
    error: str = ""
    """Text for clients: why it could not be opened when it was asked for last; the log has the cause, which may name
    folders of this machine."""
    too_large: str = ""
    """Why it did not fit beside the first model alone."""

    @property
    def state(self) -> Literal["loaded", "loading", "unloaded"]:
        return "loaded" if self.views else "unloaded" if self.loading is None else "loading"

    @property
    def is_idle(self) -> bool:
        """Whether it is open and nobody uses it."""
        return bool(self.views) and not self.num_waiting and not next(iter(self.views.values())).num_under_way

    def opened_as(self, service: Service) -> None:
        """Take the service of this base's engine, which answers under each of the names."""
        self.views = {name: _view(service, name, number) for name, number in self.names.items()}


def _view(service: Service, name: str, adapter: int) -> Service:
    view = copy.copy(service)
    view.name, view.adapter = name, adapter
    return view


def bases_of(name: str, model: str, adapter: str | None, more: Sequence[str]) -> list[Base]:
    """The first model and those that `more` names, each as NAME=MODEL. ValueError for what cannot be."""
    found, adapters = [Base(model, _key_of(model, adapter), {name: 0})], []
    for text in more:
        own, sign, place = text.partition("=")
        if not sign or not own or not place:
            raise ValueError(
                f"{text!r}: write further models as NAME=MODEL: the name under which one is served, then the model."
            )
        if own in {name, *(other for base in found for other in base.names), *(other for other, _ in adapters)}:
            raise ValueError(f"{own!r} names two models. Choose another name for one of them.")
        if find_place(place).adapter is None:
            found.append(Base(place, _key_of(place), {own: 0}))
        else:
            adapters.append((own, place))
    for own, place in adapters:
        at = find_place(place)
        key = _key(at.weights, at.quantize)
        base = next((base for base in found if base.key == key), None)
        if base is None:
            found.append(Base(place, None, {own: 0}))
        else:
            base.adapters += (str(at.adapter),)
            base.names[own] = len(base.adapters)
    return found


def _key_of(model: str, adapter: str | None = None) -> tuple[str, ...] | None:
    place = find_place(model, adapter)
    return None if place.adapter is not None or place.checkpoint is not None else _key(place.weights, None)


def _key(weights: str, quantize: str | None) -> tuple[str, ...]:
    path = Path(weights)
    return (str(path.resolve()) if path.exists() else weights, quantize or "")


def settings_beside(settings: InferSettings, opened: Sequence[OpenedModel]) -> InferSettings:
    """Make a further model's settings: the user's, less memory that other models hold. Only the first may run code of
    its own: whoever asks for another by its name must not have that one's code run."""
    left: dict[str, Any] = {}
    homes: tuple[Literal["vram", "ram"], ...] = "vram", "ram"
    for home in homes:
        given = getattr(settings, name := f"{home}_gib")
        if given is not None:
            placements = [one.placement for one in opened]
            used = sum(p.bytes_at(home) + p.kv_bytes * (p.kv_home == home) for p in placements)
            left[name] = max(given - used / GIB, 1e-3)
    return replace(settings, adapter=None, draft_model=None, trust_remote_code=False, **left)


OpenOne = Callable[[Base, Sequence[OpenedModel]], Service]
"""Opens a base beside models that are open, and starts its service; on a thread."""


class Models:
    """Models of a server. `open_one` is for those that are not open yet."""

    def __init__(self, first: Service, bases: Sequence[Base] = (), open_one: OpenOne | None = None) -> None:
        self.first, self._bases = first, list(bases) or [Base("", None, {first.name: 0})]
        self._open_one, self._idle_s = open_one, first.settings.unload_after_s
        self._bases[0].opened_as(first)
        self._lock = asyncio.Lock()  # one is opened or closed at a time: each measures what memory is free
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def named(self) -> Mapping[str, Base]:
        """Every name, and what answers under it."""
        return {name: base for base in self._bases for name in base.names}

    def find(self, name: Any) -> tuple[str, Base]:
        """(the name, what answers under it); the first model where none is named. 404 for another's."""
        name = self.first.name if name is None else name
        base = self.named.get(name) if isinstance(name, str) else None
        if base is None:
            has = ", ".join(map(repr, self.named))
            words = f"The model {name!r} is not here; this server has {has}."
            raise ApiError(404, words, param="model", code="model_not_found")
        return name, base

    def loaded(self, name: str | None) -> Service:
        """The service of this name; 404 where it is not open."""
        name, base = self.find(name)
        if not base.views:
            words = f"The model {name!r} is not loaded. Ask it something first."
            raise ApiError(404, words, param="model", code="model_not_loaded")
        return base.views[name]

    @asynccontextmanager
    async def held(self, name: Any) -> AsyncIterator[Service]:
        """The service of this name, which stays open meanwhile. ApiError where it cannot be opened, and where too many
        wait for that."""
        name, base = self.find(name)
        if not base.views and base.num_waiting >= (most := self.first.settings.max_queue):
            words = f"{most} requests wait until {name!r} is loaded. Try again later."
            raise ApiError(429, words, code="queue_full", retry_s=5)
        base.num_waiting += 1
        try:
            if not base.views:
                await self._loaded(base)
            yield base.views[name]
        finally:
            base.num_waiting -= 1
            base.used_s = time.monotonic()
            if base is not self._bases[0] and not self.first.is_stopping:
                self._look_after(self._idle_s, base)

    async def _loaded(self, base: Base) -> None:
        if base.loading is None:
            base.loading = asyncio.create_task(self._load(base))
        limit_s = self.first.settings.request_timeout_s
        done, _ = await asyncio.wait({base.loading}, timeout=limit_s)
        if not done:
            raise ApiError(503, f"{self._words(base)} is still being loaded.", code="model_loading", retry_s=5)
        done.pop().result()

    async def _load(self, base: Base) -> None:
        """Open a base, in the room of others that nobody uses if need be."""
        assert self._open_one is not None
        try:
            async with self._lock:
                while True:
                    if self.first.is_stopping:
                        raise stops()
                    services = [next(iter(other.views.values())) for other in self._bases if other.views]
                    others = [other for other in self._bases[1:] if other.views]
                    if others and base.too_large:  # closing them would not do
                        raise self._refusal(base, DoesNotFit(base.too_large), is_lasting=True)
                    try:
                        service = await asyncio.to_thread(self._open_one, base, [s.opened for s in services])
                        break
                    except DoesNotFit as error:
                        base.too_large = "" if others else str(error)
                        idle = min((o for o in others if o.is_idle), key=lambda o: o.used_s, default=None)
                        if idle is None:
                            raise self._refusal(base, error, is_lasting=not others) from error
                        await self._close(idle)
                base.opened_as(service)
                base.error = base.too_large = ""
        except ApiError:
            raise
        except Exception as error:
            raise self._refusal(base, error, is_lasting=True) from error
        finally:
            base.loading = None

    def _refusal(self, base: Base, error: Exception, *, is_lasting: bool) -> ApiError:
        why = "does not fit beside what is loaded" if isinstance(error, DoesNotFit) else "could not be opened"
        logger.error("%s %s", self._words(base), why, exc_info=error)
        base.error = f"{why}; see the server's log"
        code, retry_s = "model_not_loaded", None if is_lasting else 30
        words = f"{self._words(base)} {base.error}."
        return ApiError(400 if is_lasting else 503, words, param="model", code=code, retry_s=retry_s)

    def _words(self, base: Base) -> str:
        return f"The model {next(iter(base.names))!r}"

    def _look_after(self, delay_s: float, base: Base) -> None:
        if base.timer is None:
            base.timer = asyncio.get_running_loop().call_later(delay_s, self._look, base)

    def _look(self, base: Base) -> None:
        """Close a base that nobody has asked for."""
        base.timer = None
        if base.state == "unloaded" or self.first.is_stopping:
            return
        if not base.is_idle:  # it comes only now, or its answer takes longer than that
            self._look_after(self._idle_s, base)
        elif (left_s := base.used_s + self._idle_s - time.monotonic()) > 0:
            self._look_after(left_s, base)
        else:
            task = asyncio.create_task(self._close_idle(base))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_idle(self, base: Base) -> None:
        async with self._lock:
            if base.is_idle:
                await self._close(base)

    async def _close(self, base: Base) -> None:
        service, base.views = next(iter(base.views.values())), {}
        await asyncio.to_thread(service.close)
        del service
        await asyncio.to_thread(gc.collect)

    def end_answers(self) -> None:
        """Tell all clients that wait that the server stops."""
        self.first.end_answers()
        for base in self._bases[1:]:
            for view in base.views.values():
                view.end_answers()

    async def close(self) -> None:
        """Close all but the first."""
        async with self._lock:
            for base in self._bases[1:]:
                if base.views:
                    await self._close(base)
