"""`outcore serve MODEL`: an address that speaks OpenAI's API, for one model of any size."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from socket import socket
from typing import TYPE_CHECKING

from outcore import apart
from outcore.common.errors import need_packages
from outcore.common.output import say, tell_error
from outcore.config.commands import serve_flags
from outcore.infer.commands import settings_of
from outcore.infer.opening import InferSettings, OpenedModel, open_engine
from outcore.serve.handover import handover_of, run_handover
from outcore.serve.settings import ServeSettings, listen, read_keys

if TYPE_CHECKING:
    from outcore.serve.app import Addition
    from outcore.serve.models import Base
    from outcore.serve.service import Service
    from outcore.serve.stopping import Server

SWITCH_S = 5e-4
"""Seconds that one thread may hold Python's lock (the GIL): each write to a client releases it, and would wait ten
times as long (Python's own 5 ms) for the engine's thread to give it back."""
NEEDED = ("fastapi", "uvicorn", "python_multipart")


def main(argv: list[str] | None = None, additions: Callable[[Service], Sequence[Addition]] = lambda service: ()) -> int:
    """The subcommand; returns its exit code. `additions`: routes of rooms above."""
    args = serve_flags().parse_args(argv)
    try:
        need_packages(NEEDED, "serving", "serve")
        settings = ServeSettings(
            args.host,
            args.port,
            () if args.api_key_file is None else read_keys(args.api_key_file),
            args.insecure,
            args.served_name or args.model,
            args.max_queue,
            args.max_body_mib << 20,
            args.max_answer_tokens,
            args.request_timeout,
            args.log_dir,
            args.record_text,
            tuple(args.allowed_host),
            tuple(args.allowed_folder),
            args.unload_after,
        )
        from outcore.serve.models import bases_of

        if args.more and args.engine == "vllm":
            raise ValueError("--engine vllm serves one model: leave the others out.")
        bases = bases_of(settings.name, args.model, args.adapter, args.more)
        with listen(settings.host, settings.port) as listening:
            if args.engine != "vllm" or _hand_over(args, settings, listening):
                _serve(args, settings, listening, additions, bases)
    except (ValueError, RuntimeError, OSError) as error:
        return tell_error("serve", error)
    return 0


def _hand_over(args: argparse.Namespace, settings: ServeSettings, listening: socket) -> bool:
    """Serve through vLLM; whether our own engine has to go on because vLLM failed."""
    need_packages(("httpx",), "--engine vllm", "serve")
    handover = handover_of(args, serve_flags().parse_args([args.model]), settings)
    why = run_handover(handover, settings, listening, say)
    if why:
        say(f"warning: vLLM cannot serve this: {why}\nwarning: going on with our own engine on one GPU")
    return bool(why)


def _serve(
    args: argparse.Namespace,
    settings: ServeSettings,
    listening: socket,
    additions: Callable[[Service], Sequence[Addition]],
    bases: Sequence[Base],
) -> None:
    infer = settings_of(args, deterministic=args.deterministic)
    server = open_server(args.model, infer, settings, listening, additions, say, bases)
    gc.freeze()  # a look through the model's and the libraries' objects would hold every answer for half a second
    with suppress(KeyboardInterrupt), switching_often():
        server.run(sockets=[listening])


@contextmanager
def switching_often() -> Iterator[None]:
    """Have Python's threads change places as often as a server needs it, meanwhile."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def open_server(
    model: str,
    infer: InferSettings,
    settings: ServeSettings,
    listening: socket,
    additions: Callable[[Service], Sequence[Addition]],
    tell: Callable[[str], None],
    bases: Sequence[Base] = (),
) -> Server:
    """A server of the model that is ready to run on this address; what it serves is closed when it has ended. `bases`:
    the model, with adapters beside it, and others that are opened when they are asked for. ValueError or RuntimeError,
    in words."""
    from outcore.serve.app import create_app
    from outcore.serve.models import Models, settings_beside
    from outcore.serve.service import Service
    from outcore.serve.stopping import Server

    apart.begin()  # its imports take seconds, in which the model is opened
    adapters = bases[0].adapters if bases else ()
    service = Service(open_engine(model, replace(infer, adapters=adapters), tell), settings)

    def open_one(base: Base, opened: Sequence[OpenedModel]) -> Service:
        name, beside = next(iter(base.names)), settings_beside(infer, opened)
        found = open_engine(base.place, replace(beside, adapters=base.adapters), lambda line: tell(f"{name}: {line}"))
        try:
            other = Service(found, replace(settings, name=name), service)
            other.start()
        except BaseException:
            found.close()
            raise
        return other

    models = Models(service, bases, open_one)
    if why := service.metrics.against_plan.why_not:
        tell(f"no forecast beside the measured passes: {why}")
    tell(f"records: {service.records.path}")
    listening.listen()  # who connects before the event loop runs waits, and is not refused
    tell(f"listening on http://{settings.host}:{listening.getsockname()[1]}/v1 as {', '.join(models.named)}")
    return Server(create_app(service, additions(service), models))
