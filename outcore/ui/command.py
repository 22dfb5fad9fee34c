"""`outcore ui`: train, watch, chat and evaluate in the browser, on this machine's address."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

from outcore.common.errors import need_packages
from outcore.common.output import tell_error
from outcore.config.commands import ui_flags
from outcore.serve import listen, read_keys
from outcore.ui.settings import UiSettings

NEEDED = ("fastapi", "uvicorn", "python_multipart", "gradio", "httpx", "markdown_it")
STOP_WITHIN_S = 3
"""Connections that are still open so long after the panels were told to stop are cut: pages in browsers keep some."""


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    args = ui_flags().parse_args(argv)
    try:
        need_packages(NEEDED, "the panels", "ui")
        tokens = () if args.token_file is None else read_keys(args.token_file)
        asked = UiSettings(args.host, args.port, tokens, tuple(args.allowed_host), tuple(args.allowed_folder))
        listening = listen(asked.host, asked.port)
        settings = replace(asked, port=listening.getsockname()[1])
        run(settings, listening)
    except (ValueError, RuntimeError, OSError) as error:
        return tell_error("ui", error)
    return 0


def run(settings: UiSettings, listening: socket.socket) -> None:
    """Serve until Ctrl-C."""
    from outcore.serve.additions import Server
    from outcore.ui.api import PanelsApi, warm_up
    from outcore.ui.app import create_app

    app = create_app(settings, PanelsApi(allowed=settings.allowed_folders))
    where = f"http://{settings.own_host}:{settings.port}"
    print(f"panels: {where}{'/?token=...' if settings.tokens else ''}  (Ctrl-C ends them; runs go on)", flush=True)
    server = Server(app, timeout_graceful_shutdown=STOP_WITHIN_S)

    def warm_up_then() -> None:
        while not server.started:  # imports side by side would make the start longer
            time.sleep(0.2)
        warm_up()

    threading.Thread(target=warm_up_then, name="warm up", daemon=True).start()
    server.run(sockets=[listening])
