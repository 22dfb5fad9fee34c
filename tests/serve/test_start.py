"""`outcore start`: a client is told where the model is, for as long as it runs."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from outcore.config.commands.serving import CLIENTS
from tests.forked import ROOT

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
AGENT = """#!{python}
import glob, json, os, sys, tempfile, urllib.request
url = os.environ["ANTHROPIC_BASE_URL"]
body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 3, "messages": [{{"role": "user", "content": "Hi"}}]}}
heads = {{"content-type": "application/json", "x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"]}}
asked = urllib.request.Request(url + "/v1/messages", json.dumps(body).encode(), heads)
said = json.loads(urllib.request.urlopen(asked, timeout=60).read())
left = glob.glob(tempfile.gettempdir() + "/outcore-start-*")
open("told.json", "w").write(json.dumps([sys.argv[1:], said["type"], url, left]))
sys.exit(7)
"""
ENDING = """
import os, signal, sys, time, urllib.request

def told_to_end(*_):
    if sys.argv[1] != "SIGKILL":
        os.kill(starter, signal.SIGTERM)  # told again while it waits for this client
        time.sleep(0.5)
        urllib.request.urlopen(os.environ["ANTHROPIC_BASE_URL"] + "/health", timeout=60)
    open("ended", "w")
    sys.exit()

starter = int(os.environ["STARTER"])
signal.signal(signal.SIGTERM, told_to_end)
os.kill(starter, getattr(signal, sys.argv[1]))
time.sleep(20)
"""
"""A client that has its session ended, and notes that it was told to end, too, while the model was still there."""
SESSION = """
import json, signal, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from outcore.serve.handover import process, start

class Model(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"max_model_len": 9, "max_tokens": 9}]}).encode())
    do_POST = do_GET

class StandIn(process.ServerProcess):
    def bring_up(self):
        self.log.parent.mkdir(parents=True)
        self.log.write_text(f"listening on {self.url}/v1")
        self.server = ThreadingHTTPServer(("127.0.0.1", int(self.url.rpartition(":")[2])), Model)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self):
        self.server.server_close()

process.ServerProcess = StandIn
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it, as under nohup
sys.exit(start.main(sys.argv[1:]))
"""
"""`outcore start` with a stand-in for the model's server."""


def make_client(folder, text):
    agent = folder / "bin/claude"
    agent.parent.mkdir()
    agent.write_text(text)
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    return agent.parent


def start(folder, bin_folder, *words, begin=("-m", "outcore", "start"), **more):
    found = {
        **os.environ,
        "PATH": f"{bin_folder}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    command = [sys.executable, *begin, *words]
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
        assert int(client.variables["CLAUDE_STREAM_IDLE_TIMEOUT_MS"]) > 300_000
    if name == "codex":
        told = tomllib.loads("\n".join(word for word in client.command if "=" in word))
        assert told["model_providers"]["outcore"]["wire_api"] == "responses" and told["model"] == "a/model"
    if name == "opencode":
        config = json.loads(client.variables["OPENCODE_CONFIG_CONTENT"])
        assert config["provider"]["outcore"]["models"]["a/model"]["limit"] == {"context": 4096, "output": 400}


@pytest.mark.more
def test_a_session_ends_with_its_client(tiny_folder, tmp_path):
    """The file with the key is gone before the client begins."""
    found = make_client(tmp_path, AGENT.format(python=sys.executable))
    words = ["claude", str(tiny_folder[0]), "--device", "cpu", "--ram_gib", "1", "--context", "256"]
    more = dict.fromkeys(("HTTP_PROXY", "http_proxy"), "http://127.0.0.1:9")  # nothing is there: nobody may ask it
    ended = start(tmp_path, found, *words, "--", "--print", "hello", **more, TMPDIR=str(tmp_path))
    assert ended.returncode == 7, ended.stderr
    told, kind, url, left = json.loads((tmp_path / "told.json").read_text())
    assert told == ["--print", "hello"] and kind == "message" and not left
    (log,) = tmp_path.glob("logs/**/start-*.log")
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    import httpx

    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("name", "code"), [("SIGHUP", 129), ("SIGKILL", -9), ("SIGTERM", 143)])
def test_a_client_ends_with_a_session_that_is_told_to_end(tmp_path, name, code):
    """Also where what is on PATH is a script that starts the program."""
    (tmp_path / "ending.py").write_text(ENDING)
    (tmp_path / "session.py").write_text(SESSION)
    through = "exec" if name == "SIGKILL" else ""  # a kill reaches what was started itself
    text = f'#!/bin/sh\nSTARTER=$PPID {through} {sys.executable} {tmp_path / "ending.py"} "$@"\nexit $?\n'
    found = make_client(tmp_path, text)
    ended = start(tmp_path, found, "claude", "model", "--", name, begin=[str(tmp_path / "session.py")])
    assert ended.returncode == code, ended.stderr
    assert (tmp_path / "ended").exists()


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("KILL", 137), ("SEGV", 139)])
def test_a_client_that_a_signal_ends_gives_the_code_that_a_shell_gives(tmp_path, name, code):
    (tmp_path / "session.py").write_text(SESSION)
    found = make_client(tmp_path, f"#!/bin/sh\nkill -{name} $$\n")
    ended = start(tmp_path, found, "claude", "model", begin=[str(tmp_path / "session.py")])
    assert ended.returncode == code, ended.stderr


@pytest.mark.more
def test_what_cannot_be_started_is_said(tmp_path):
    ended = start(tmp_path, tmp_path, "claude", str(tmp_path / "none"), "--device", "cpu")
    assert ended.returncode == 1 and "ended with exit code" in ended.stderr and "Traceback" not in ended.stderr
    assert start(tmp_path, tmp_path, "emacs", "model").returncode == 2


class OtherProgram(BaseHTTPRequestHandler):
    """Answers 200 on any path, and notes the key that it was sent."""

    keys: ClassVar[list[str | None]] = []

    def do_GET(self):
        self.keys.append(self.headers["Authorization"])
        self.send_response(200)
        self.end_headers()

    do_POST = do_GET


@pytest.mark.more
def test_another_program_at_the_port_is_told_nothing(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), OtherProgram) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        ended = start(tmp_path, tmp_path, "claude", str(tmp_path / "none"), "--port", str(other.server_port))
        other.shutdown()
    assert ended.returncode == 1 and "another program answers at" in ended.stderr
    assert OtherProgram.keys and not any(OtherProgram.keys)


def test_a_model_that_ends_before_it_has_answered(tmp_path, monkeypatch, capsys):
    from outcore.serve.handover import process, start

    class Killed(process.ServerProcess):
        def bring_up(self):
            self.log.parent.mkdir(parents=True)
            self.log.write_text(f"listening on {self.url}/v1\nKilled")

    monkeypatch.setattr(process, "ServerProcess", Killed)
    before = signal.getsignal(signal.SIGTERM)
    assert start.main(["claude", "model", "--log_dir", str(tmp_path / "logs/serve")]) == 1
    said = capsys.readouterr().err
    assert "does not answer" in said and "Killed" in said and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("given", [["--host", "0.0.0.0"], ["--api_key_file", "keys"], ["--engine", "vllm"]])
def test_what_a_session_chooses_itself_is_refused(given, capsys):
    from outcore.serve.handover.start import main

    assert main(["claude", "model", *given]) == 2
    assert "leave" in capsys.readouterr().err
