"""The end of a server: clients are told, then connections close, then the model goes."""

from __future__ import annotations

from socket import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from outcore.common.output import say
from outcore.common.quantities import counted
from outcore.serve.app import STOP_WITHIN_S
from outcore.serve.service import Service


class Server(uvicorn.Server):
    """uvicorn's server, which tells clients that wait for an answer before it closes their connections."""

    def __init__(self, app: FastAPI, service: Service, **more: Any) -> None:
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=STOP_WITHIN_S, **more)
        super().__init__(config)
        self._app, self._service = app, service

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Tell, wait, close."""
        count = self._service.num_under_way
        if count:
            say(f"stopping: who waits for {counted(count, 'answer')} is told; the pass under way ends first")
        await self._app.state.tell_clients()
        await super().shutdown(sockets)
