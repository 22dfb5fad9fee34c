"""`outcore start`: a client is told where the model is, for as long as it runs."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tomllib

import pytest

from outcore.config.commands.serving import CLIENTS
from tests.forked import ROOT

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
AGENT = """#!{python}
import glob, json, os, signal, sys, tempfile, time, urllib.request
url = os.environ["ANTHROPIC_BASE_URL"]
body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 3, "messages": [{{"role": "user", "content": "Hi"}}]}}
heads = {{"content-type": "application/json", "x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"]}}
asked = urllib.request.Request(url + "/v1/messages", json.dumps(body).encode(), heads)
said = json.loads(urllib.request.urlopen(asked, timeout=60).read())
left = glob.glob(tempfile.gettempdir() + "/outcore-start-*")
open("told.json", "w").write(json.dumps([sys.argv[1:], said["type"], url, os.getpid(), left]))
if "--stop" in sys.argv:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(100)
sys.exit(7)
"""


def start(folder, bin_folder, *words, **more):
    found = {
        **os.environ,
        "PATH": f"{bin_folder}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    command = [sys.executable, "-m", "outcore", "start", *words]
    return subprocess.run(command, cwd=folder, env=found, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("name", CLIENTS)
def test_each_client_is_told_in_its_own_words(name):
    from outcore.serve.handover.start import client_of

    client = client_of(name, "http://127.0.0.1:9", "the-key", "a/model", 4096, 400)
    said = " ".join((*client.command, *client.variables.values()))
    assert client.command[0] == name and "http://127.0.0.1:9" in said and "a/model" in said
    assert "the-key" in " ".join(client.variables.values()) and "the-key" not in " ".join(client.command)
    assert client.asks[0] in ("/v1/messages", "/v1/responses", "/v1/chat/completions")
    if name == "claude":
        assert client.variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "400"
    if name == "codex":
        told = tomllib.loads("\n".join(word for word in client.command if "=" in word))
        assert told["model_providers"]["outcore"]["wire_api"] == "responses" and told["model"] == "a/model"
    if name == "opencode":
        config = json.loads(client.variables["OPENCODE_CONFIG_CONTENT"])
        assert config["provider"]["outcore"]["models"]["a/model"]["limit"] == {"context": 4096, "output": 400}


@pytest.mark.more
@pytest.mark.parametrize(("asked", "code"), [("--print", 7), ("--stop", 128 + signal.SIGTERM)])
def test_a_session_ends_with_its_client(tiny_folder, tmp_path, asked, code):
    """And the client with a session that is told to end. What held the key is gone before the client begins."""
    agent = tmp_path / "bin/claude"
    agent.parent.mkdir()
    agent.write_text(AGENT.format(python=sys.executable))
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    words = ["claude", str(tiny_folder[0]), "--device", "cpu", "--ram_gib", "1", "--context", "256"]
    more = dict.fromkeys(("HTTP_PROXY", "http_proxy"), "http://127.0.0.1:9")  # nothing is there: nobody may ask it
    ended = start(tmp_path, agent.parent, *words, "--", asked, "hello", **more, TMPDIR=str(tmp_path))
    assert ended.returncode == code, ended.stderr
    told, kind, url, pid, left = json.loads((tmp_path / "told.json").read_text())
    assert told == [asked, "hello"] and kind == "message" and not left
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    (log,) = tmp_path.glob("logs/**/start-*.log")
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    import httpx

    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.more
def test_what_cannot_be_started_is_said(tmp_path):
    ended = start(tmp_path, tmp_path, "claude", str(tmp_path / "none"), "--device", "cpu")
    assert ended.returncode == 1 and "ended with exit code" in ended.stderr and "Traceback" not in ended.stderr
    assert start(tmp_path, tmp_path, "emacs", "model").returncode == 2


@pytest.mark.parametrize("given", [["--host", "0.0.0.0"], ["--api_key_file", "keys"], ["--engine", "vllm"]])
def test_what_a_session_chooses_itself_is_refused(given, capsys):
    from outcore.serve.handover.start import main

    assert main(["claude", "model", *given]) == 2
    assert "leave" in capsys.readouterr().err
