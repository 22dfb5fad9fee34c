"""The end of a server: clients are told, then connections close, then the model goes."""

from __future__ import annotations

from socket import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from outcore.serve.app import STOP_WITHIN_S
from outcore.serve.gate import Connection


class Server(uvicorn.Server):
    """uvicorn's server, which has the application tell clients that wait (`app.state.tell_clients`) before it closes
    their connections."""

    def __init__(self, app: FastAPI, **more: Any) -> None:
        usual: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": STOP_WITHIN_S}
        usual |= {"http": Connection, "ws": "none", "loop": "asyncio"}  # uvloop's connections read what they like
        usual["proxy_headers"] = False  # a client would choose the address that its guesses of keys are counted by
        super().__init__(uvicorn.Config(app, **{**usual, **more}))
        self._app = app

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Tell, wait, close."""
        try:
            await self._app.state.tell_clients()
        finally:
            await super().shutdown(sockets)
