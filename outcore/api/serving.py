"""`outcore.serve`: a model under OpenAI's API from a Python program, as `outcore serve` does it."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import fields
from socket import socket
from typing import TYPE_CHECKING, Any, Literal, overload

from outcore.api.settings import check_known, infer_settings, known_names
from outcore.common.classes import Closing
from outcore.common.errors import need_packages
from outcore.infer.opening import InferSettings
from outcore.serve import NEEDED, ServeSettings, listen, open_server, switching_often

if TYPE_CHECKING:
    from outcore.serve.additions import Server

logger = logging.getLogger("outcore")


class ServedModel(Closing):
    """A server on a thread of this process; close it, or use `with`."""

    def __init__(self, server: Server, settings: ServeSettings, listening: socket) -> None:
        self._server, self._listening = server, listening
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{listening.getsockname()[1]}"
        """Address that clients take; OpenAI's base URL is this with /v1 behind it."""
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        while not server.started:
            if not self._thread.is_alive():
                raise RuntimeError(f"the server at {self.url} ended as it started; the log says why.")
            time.sleep(0.01)

    def close(self) -> None:
        """Tell clients that wait, end the pass under way, let the model go; a second time does nothing."""
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        with self._listening, switching_often():
            self._server.run(sockets=[self._listening])


@overload
def serve(
    model: str | os.PathLike[str], config: InferSettings | None = None, *, block: Literal[True] = True, **settings: Any
) -> None: ...
@overload
def serve(
    model: str | os.PathLike[str], config: InferSettings | None = None, *, block: Literal[False], **settings: Any
) -> ServedModel: ...
def serve(
    model: str | os.PathLike[str], config: InferSettings | None = None, *, block: bool = True, **settings: Any
) -> ServedModel | None:
    """Serve the model until Ctrl-C; with `block=False` beside this program, until what is returned is closed.

    `settings`: fields of `outcore.InferConfig`, and of the server: host, port (0: any that is free), api_keys, name,
    max_queue, max_answer_tokens, logs ... ValueError or RuntimeError, in words, before anything is served."""
    from outcore.evaluate.http import with_evaluations

    need_packages(NEEDED, "serving", "serve")
    of_server = {field.name for field in fields(ServeSettings)}
    check_known(settings, of_server | known_names())
    reached = ServeSettings(**{"name": str(model), **{k: v for k, v in settings.items() if k in of_server}})
    infer = infer_settings(config, {k: v for k, v in settings.items() if k not in of_server})
    listening = listen(reached.host, reached.port)
    try:
        server = open_server(str(model), infer, reached, listening, with_evaluations, logger.info)
    except BaseException:
        listening.close()
        raise
    if not block:
        return ServedModel(server, reached, listening)
    with listening, switching_often():
        server.run(sockets=[listening])
    return None
