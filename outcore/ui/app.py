"""One application: the routes, the panels drawn over them, and the guard around both."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from outcore.serve.additions import FILES, FORM, MOST_BYTES, Guard, add_errors
from outcore.ui.api import PanelsApi, table
from outcore.ui.client import Client
from outcore.ui.settings import UiSettings
from outcore.ui.sign_in import SIGN_IN, SignIn

KINDS = {FILES: FORM, "POST /gradio_api/upload": FORM, f"POST {SIGN_IN}": "application/x-www-form-urlencoded"}
"""Routes that take another kind of body than JSON."""


def create_app(settings: UiSettings, api: PanelsApi, *, with_panels: bool = True) -> FastAPI:
    """The application; what `api` holds begins and ends with it. `with_panels` False: the routes alone."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        api.begin()
        try:
            yield
        finally:
            await api.end()

    app = FastAPI(title="outcore panels", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.tell_clients = api.tell_clients
    add_errors(app)
    api.add_to(app)
    if with_panels:
        _mount_panels(app, settings)
    app.add_middleware(SignIn, tokens=settings.tokens)
    app.add_middleware(Guard, hosts=(settings.host.lower(), *settings.allowed_hosts), kinds=KINDS)
    return app


def _mount_panels(app: FastAPI, settings: UiSettings) -> None:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when it is imported
    import gradio

    from outcore.ui.panels import HEAD, build, theme

    client = Client(f"http://{settings.own_host}:{settings.port}", settings.tokens[0] if settings.tokens else "")
    gradio.mount_gradio_app(
        app,
        build(client, table()),
        path="/",
        server_name=settings.host,
        server_port=settings.port,
        footer_links=[],
        ssr_mode=False,
        show_error=True,
        theme=theme(),
        max_file_size=MOST_BYTES,
        head=HEAD,
    )
