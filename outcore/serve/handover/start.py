"""`outcore start CLIENT MODEL`: a coding agent, or a chat, on a model of this machine, for one session.

The server runs in a process of its own, on a free port and with a key that nobody else has; the client is told of both
by its environment and its arguments alone, so no file of its user changes. When the client ends, so does the server."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from outcore.common.diagnostics import DiagnosticLog
from outcore.common.errors import need_packages
from outcore.common.os_layer import before_exec, stop_signals
from outcore.common.output import say, tell_error
from outcore.common.ports import free_port
from outcore.config.commands import start_flags

MESSAGES = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@dataclass(frozen=True)
class AgentClient:
    """Command and environment that point a client at the model. `asks`: path and body of a request as it sends them."""

    command: tuple[str, ...]
    variables: dict[str, str]
    asks: tuple[str, dict[str, Any]]

    def lines(self) -> list[str]:
        """The settings as a shell takes them."""
        quoted = [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return [*quoted, " ".join(map(shlex.quote, self.command))]


def client_of(name: str, url: str, key: str, model: str, context: int, answer: int) -> AgentClient:
    """Make the settings of a client of the server at `url`. `answer`: tokens that it may ask for, of the `context`."""
    open_ai = f"{url}/v1"
    if name == "claude":
        kinds = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL", "SMALL_FAST_MODEL")
        variables = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, "ANTHROPIC_API_KEY": ""}
        variables |= {f"ANTHROPIC_{kind}": model for kind in kinds}
        # It gives up a stream without events after 5 minutes, which a long first prompt takes on a slow machine.
        variables |= dict.fromkeys(("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS"), "3000000")
        variables["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(answer)
        return AgentClient(("claude",), variables, ("/v1/messages", MESSAGES))
    if name == "codex":
        provider = f'{{name="outcore",base_url="{open_ai}",env_key="OUTCORE_API_KEY",wire_api="responses"}}'
        told = {
            "model": json.dumps(model), "model_provider": '"outcore"', "model_context_window": str(context),
            "model_providers.outcore": provider,
        }  # fmt: skip
        flags = [word for key_, value in told.items() for word in ("-c", f"{key_}={value}")]
        asked = {"input": "Hi", "max_output_tokens": 1, "store": False}
        return AgentClient(("codex", *flags), {"OUTCORE_API_KEY": key}, ("/v1/responses", asked))
    asks = ("/v1/chat/completions", MESSAGES)
    if name == "opencode":
        limit = {"context": context, "output": min(answer, context // 2)}
        provider = {
            "npm": "@ai-sdk/openai-compatible", "name": "outcore", "options": {"baseURL": open_ai, "apiKey": key},
            "models": {model: {"name": model, "limit": limit}},
        }  # fmt: skip
        config = {"provider": {"outcore": provider}, "model": f"outcore/{model}", "small_model": f"outcore/{model}"}
        return AgentClient(("opencode",), {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, asks)
    if name == "aider":
        variables = {"OPENAI_API_BASE": open_ai, "OPENAI_API_KEY": key}
        return AgentClient(("aider", "--model", f"openai/{model}", "--no-show-model-warnings"), variables, asks)
    variables = {
        "OPENAI_API_BASE_URL": open_ai,
        "OPENAI_API_KEY": key,
        "ENABLE_OLLAMA_API": "False",
        "DEFAULT_MODELS": model,
    }
    return AgentClient(("open-webui", "serve"), variables, asks)


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code, which is the client's."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    args = start_flags().parse_args(words[:at])
    serve_words = words[:at]
    serve_words.remove(args.client)
    try:
        need_packages(("fastapi", "uvicorn", "httpx"), "serving", "serve")
        if args.engine == "vllm":
            raise ValueError("start serves by our own engine: leave --engine vllm out.")
        if args.api_key_file is not None or args.host != start_flags().get_default("host"):
            raise ValueError("start serves this session's client alone: leave --host and --api_key_file out.")
        return _session(args, serve_words, words[at + 1 :])
    except (ValueError, RuntimeError, OSError) as error:
        return tell_error("start", error)


def _session(args: Any, serve_words: Sequence[str], client_words: Sequence[str]) -> int:
    """Serve, ask once, run the client, end."""
    import httpx

    from outcore.serve.handover.process import Care, ServerProcess

    key, port = secrets.token_hex(16), args.port or free_port()
    name, url = args.served_name or args.model, f"http://127.0.0.1:{port}"
    log = args.log_dir / f"start-{time.strftime('%Y%m%d-%H%M%S')}.log"
    events = DiagnosticLog(args.log_dir.parent / "diagnostics")
    command = [sys.executable, "-m", "outcore", "serve", *serve_words, "--port", str(port), "--host", "127.0.0.1"]
    command += ["--max_answer_tokens", str(args.max_answer_tokens), "--api_key_file"]
    before = {each: signal.getsignal(each) for each in stop_signals()}
    process = None
    try:
        for each, handler in before.items():
            if handler is not signal.SIG_IGN:  # as nohup has it
                signal.signal(each, _told_to_end)
        with tempfile.TemporaryDirectory(prefix="outcore-start-") as folder:
            key_file = Path(folder) / "key"
            key_file.write_text(key, encoding="utf-8")
            care = Care(start_timeout_s=args.start_timeout)
            process = ServerProcess([*command, str(key_file)], {}, url, log, care, events.note)
            say(f"the model starts; its log: {log}")
            process.bring_up()  # it has read the key, which goes here: a kill leaves nothing of it
        if f"listening on {url}/" not in log.read_text(encoding="utf-8", errors="replace"):
            # Whoever took the port first must get neither the key nor the conversation.
            raise RuntimeError(f"another program answers at {url}: start again, with another --port or none.")
        try:
            client = _tried(args.client, url, key, name)
        except httpx.HTTPError as error:
            raise RuntimeError(f"the model does not answer ({error}):\n{process.last_words()}") from error
        say(f"{name} answers at {url}")
        return _run(client, client_words)
    except KeyboardInterrupt:
        return 0
    finally:
        if process is not None:
            process.stop()
        for each, handler in before.items():
            signal.signal(each, handler)


def _told_to_end(number: int, _: object) -> NoReturn:
    """Unwind, so that client and model end. Once: who is told again still waits for both."""
    for each in stop_signals():
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _tried(client: str, url: str, key: str, model: str) -> AgentClient:
    """The client's settings by the server's limits, after one request as it sends them. RuntimeError if refused."""
    import httpx

    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=600) as asks:
        first = asks.get(f"{url}/v1/models").raise_for_status().json()["data"][0]
        found = client_of(client, url, key, model, int(first["max_model_len"]), int(first["max_tokens"]))
        path, body = found.asks
        answer = asks.post(f"{url}{path}", json=body)
    if answer.status_code != 200:
        raise RuntimeError(f"a request to {path} was answered with {answer.status_code}: {answer.text}")
    return found


def _run(client: AgentClient, more: Sequence[str]) -> int:
    """Run the client until it ends, or tell how, and wait, where it is not installed."""
    executable = shutil.which(client.command[0])
    if executable is None:
        say(f"{client.command[0]} is not installed here (not on PATH). Wherever it is, on this machine:")
        for line in client.lines():
            say(f"  {line}")
        say("Ctrl-C ends the model.")
        signal.pause()
    from outcore.serve.handover.process import ends_with_us

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's
    tie = ends_with_us()
    running = subprocess.Popen(
        [str(executable), *client.command[1:], *more], env=_unproxied({**os.environ, **client.variables}),
        **before_exec(lambda: (signal.signal(signal.SIGINT, signal.SIG_DFL), tie())),
    )  # fmt: skip
    try:
        code = running.wait()
        return code if code >= 0 else 128 - code  # as a shell has it where a signal ended the client
    except SystemExit:
        with suppress(psutil.NoSuchProcess):  # it has ended by itself
            _end(psutil.Process(running.pid))
        raise


def _end(client: psutil.Process) -> None:
    """End a client and all that it started: what is on PATH is often a script around the program."""
    from outcore.serve.handover.process import STOP_S

    left = [client, *client.children(recursive=True)]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for one in left:
            with suppress(psutil.NoSuchProcess):
                end(one)
        left = psutil.wait_procs(left, STOP_S)[1]


def _unproxied(environ: dict[str, str]) -> dict[str, str]:
    """The environment, by which no proxy is asked for this machine: it would be sent the key and all that is said."""
    for name in ("NO_PROXY", "no_proxy"):
        there = environ.get(name, "")
        environ[name] = there if there == "*" else ",".join(filter(None, (there, "127.0.0.1")))
    return environ
