"""`outcore serve MODEL`: an address that speaks OpenAI's API, for one model of any size."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from socket import socket
from typing import TYPE_CHECKING

from outcore import apart
from outcore.common.errors import need_packages
from outcore.common.output import say, tell_error
from outcore.config.commands import serve_flags
from outcore.infer.commands import settings_of
from outcore.infer.opening import InferSettings, open_engine
from outcore.serve.handover import handover_of, run_handover
from outcore.serve.settings import ServeSettings, listen, read_keys

if TYPE_CHECKING:
    from outcore.serve.app import Addition
    from outcore.serve.service import Service
    from outcore.serve.stopping import Server

SWITCH_S = 5e-4
"""How long one thread may hold Python: each write to a client lets it go, and would wait ten times as long (Python's
own 5 ms) for the engine's thread to give it back."""
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
        )
        with listen(settings.host, settings.port) as listening:
            if args.engine != "vllm" or _hand_over(args, settings, listening):
                _serve(args, settings, listening, additions)
    except (ValueError, RuntimeError, OSError) as error:
        return tell_error("serve", error)
    return 0


def _hand_over(args: argparse.Namespace, settings: ServeSettings, listening: socket) -> bool:
    """Serve through vLLM; whether our own engine has to go on because vLLM failed."""
    if importlib.util.find_spec("httpx") is None:
        raise RuntimeError("--engine vllm needs httpx: pip install -r requirements/serve.txt")
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
) -> None:
    server = open_server(
        args.model, settings_of(args, deterministic=args.deterministic), settings, listening, additions, say
    )
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
) -> Server:
    """A server of the model that is ready to run on this address; what it serves is closed when it has ended.
    ValueError or RuntimeError, in words."""
    from outcore.serve.app import create_app
    from outcore.serve.service import Service
    from outcore.serve.stopping import Server

    apart.begin()  # its imports take seconds, in which the model is opened
    service = Service(open_engine(model, infer, tell), settings)
    if why := service.metrics.against_plan.why_not:
        tell(f"no forecast beside the measured passes: {why}")
    tell(f"records: {service.records.path}")
    tell(f"listening on http://{settings.host}:{listening.getsockname()[1]}/v1 as {service.name!r}")
    return Server(create_app(service, additions(service)))
