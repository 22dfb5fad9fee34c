"""`outcore serve`, up to the moment in which uvicorn takes over."""

import asyncio

import pytest

from outcore.serve import listen
from outcore.serve.main import main

pytest.importorskip("fastapi")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("more", [[], ["other={}"]])
def test_the_command_opens_the_model_and_says_where_it_listens(tiny_folder, tmp_path, monkeypatch, capfd, more):
    """It died at every start once, because only servers made in tests were started by tests."""
    import uvicorn
    from fastapi.testclient import TestClient

    seen = []

    def run(server, sockets):
        with TestClient(server.config.app) as client:
            (where,) = (one.getsockname() for one in sockets)
            seen.append((*where, client.get("/health").status_code, client.get("/metrics").status_code))
            states = [model["state"] for model in client.get("/v1/models").json()["data"]]
            assert states == ["loaded", *["unloaded"] * len(more)]

    monkeypatch.setattr(uvicorn.Server, "run", run)
    argv = [
        str(tiny_folder[0]),
        *(one.format(tiny_folder[0]) for one in more),
        "--device",
        "cpu",
        "--context",
        "64",
        "--ram_gib",
        "1",
        "--port",
        "0",
    ]
    assert main([*argv, "--log_dir", str(tmp_path)]) == 0, capfd.readouterr().err
    ((host, port, *codes),) = seen
    assert host == "127.0.0.1" and codes == [200, 200]
    assert f"listening on http://127.0.0.1:{port}/v1" in capfd.readouterr().err


@pytest.mark.parametrize("engine", ["outcore", "vllm"])
def test_a_port_that_is_taken_is_said_before_the_model_is_opened(engine, capfd):
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["/no/model/is/asked/for", "--engine", engine, "--port", str(port)]) == 1
    said = capfd.readouterr().err
    assert f"127.0.0.1:{port} cannot be opened" in said and "another --port" in said


def test_a_config_that_nests_too_deeply_names_its_model(tmp_path, capfd):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}")
    (tmp_path / "model.safetensors").touch()
    assert main([str(tmp_path), "--port", "0"]) == 2
    assert f"The model in '{tmp_path}' cannot be read" in capfd.readouterr().err


def test_connections_close_also_where_clients_cannot_be_told(monkeypatch):
    import uvicorn
    from fastapi import FastAPI

    from outcore.serve.stopping import Server

    async def shutdown(server, sockets=None):
        closed.append(sockets)

    async def fails():
        raise OSError("the drive is full")

    app, closed = FastAPI(), []
    app.state.tell_clients = fails
    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    with pytest.raises(OSError, match="drive is full"):
        asyncio.run(Server(app).shutdown())
    assert closed == [None]
