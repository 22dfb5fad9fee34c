"""`outcore serve`, up to the moment in which uvicorn takes over."""

import pytest

from outcore.serve.main import main

pytest.importorskip("fastapi")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_command_opens_the_model_and_says_where_it_listens(tiny_folder, tmp_path, monkeypatch, capfd):
    """It died at every start once, because only servers made in tests were started by tests."""
    import uvicorn
    from fastapi.testclient import TestClient

    seen = []

    def run(app, *, host, port, **how):
        with TestClient(app) as client:
            seen.append((host, port, client.get("/health").status_code, client.get("/metrics").status_code))

    monkeypatch.setattr(uvicorn, "run", run)
    argv = [str(tiny_folder[0]), "--device", "cpu", "--context", "64", "--ram_gib", "1", "--port", "8123"]
    assert main([*argv, "--log_dir", str(tmp_path)]) == 0, capfd.readouterr().err
    assert seen == [("127.0.0.1", 8123, 200, 200)]
    assert "listening on http://127.0.0.1:8123/v1" in capfd.readouterr().err
