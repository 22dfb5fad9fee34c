"""Jobs over HTTP: files in and out, batches that are answered in the background, single requests by their ids."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.responses import FileResponse, Response
from starlette.requests import Request as HttpRequest

from outcore.serve.body import read_body, read_bytes
from outcore.serve.errors import bad
from outcore.serve.jobs.batches import Batches
from outcore.serve.jobs.files import Files, parts_of
from outcore.serve.service import Service

FilesLimit = Annotated[int, Query(ge=1, le=10_000)]
BatchesLimit = Annotated[int, Query(ge=1, le=100)]


def add_jobs(app: FastAPI, service: Service, batches: Batches) -> None:
    """The endpoints /v1/files, /v1/batches and /v1/requests."""
    files, most = batches.files, service.settings.max_body_bytes

    @app.post("/v1/files")
    async def send(http: HttpRequest) -> dict[str, Any]:
        kind, data = http.headers.get("content-type", ""), await read_bytes(http, most)
        parts = await service.reading.run(parts_of, kind, data)  # forms of many parts take seconds
        if "file" not in parts:
            raise bad("The form has no file.", "file")
        purpose = parts.get("purpose", ("", b""))[1].decode(errors="replace")
        if purpose != "batch":
            raise bad("purpose must be batch.", "purpose")
        name, content = parts["file"]
        return asdict(await service.reading.run(files.add, content, name or "file.jsonl", purpose))

    @app.get("/v1/files")
    def list_files(after: str | None = None, limit: FilesLimit = 10_000) -> dict[str, Any]:
        return _page([asdict(file) for file in files.all()], after, limit)

    app.get("/v1/files/{name}")(files.get)

    @app.get("/v1/files/{name}/content")
    async def fetch(name: str) -> Response:
        return FileResponse(files.path(name), media_type="application/octet-stream")

    @app.delete("/v1/files/{name}")
    async def remove(name: str) -> dict[str, Any]:
        batches.check_free(name)
        files.remove(name)
        return {"id": name, "object": "file", "deleted": True}

    @app.post("/v1/batches")
    async def create(http: HttpRequest) -> dict[str, Any]:
        return await batches.create(await read_body(http, most))

    @app.get("/v1/batches")
    def list_batches(after: str | None = None, limit: BatchesLimit = 20) -> dict[str, Any]:
        return _page(batches.all(), after, limit)

    app.get("/v1/batches/{name}")(batches.get)
    app.post("/v1/batches/{name}/cancel")(batches.cancel)

    @app.get("/v1/requests")
    async def list_requests() -> dict[str, Any]:
        return {"object": "list", "data": service.under_way.all(), "has_more": False}

    @app.get("/v1/requests/{name}")
    async def look_at(name: str) -> dict[str, Any]:
        return service.under_way.get(name)

    @app.post("/v1/requests/{name}/cancel")
    async def cancel_one(name: str) -> dict[str, Any]:
        return service.under_way.cancel(name)


def _page(found: list[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """So many of what was found, behind the one with the id `after`. ApiError for an id that is not there."""
    ids = [one["id"] for one in found]
    if after is not None and after not in ids:
        raise bad(f"after is {after!r}, which is not in the list.", "after")
    start = 0 if after is None else ids.index(after) + 1
    shown = ids[start : start + limit]
    ends = {"first_id": shown[0] if shown else None, "last_id": shown[-1] if shown else None}
    return {"object": "list", "data": found[start : start + limit], **ends, "has_more": start + limit < len(ids)}
