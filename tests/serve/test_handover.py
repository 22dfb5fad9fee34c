"""`outcore serve --engine vllm` with a stand-in for vLLM: real processes, real HTTP."""

import gc
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvicorn

from outcore.common.ports import free_port
from outcore.config.commands import serve_flags
from outcore.serve import ServeSettings, listen
from outcore.serve.handover import handover_of
from outcore.serve.handover.environment import ensure_environment
from outcore.serve.handover.process import Care, ServerProcess
from outcore.serve.handover.run import run_handover
from outcore.serve.main import main
from tests.waiting import until

STAND_IN = Path(__file__).with_name("stand_in.py")
QUICK = Care(120, look_every_s=0.05, answer_within_s=4, max_failed_looks=2, max_restarts=20)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM runs on Linux")


@pytest.fixture(scope="module")
def executable(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("bin") / "vllm"
    file.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def model_in(folder: Path, **behaviour) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "behaviour.json").write_text(json.dumps(behaviour))
    return folder


def cluster_in(folder: Path, text: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


def flags_of(model: Path, executable: Path, *more: str, islands: str = "[[0, 1], [2, 3]]") -> list[str]:
    cluster = cluster_in(model, f"hosts: [{{name: here, islands: {islands}}}]")
    return [str(model), "--engine", "vllm", "--vllm_executable", str(executable), "--cluster", str(cluster), *more]


def handover(argv: list[str], settings: ServeSettings):
    return handover_of(serve_flags().parse_args(argv), serve_flags().parse_args([argv[0]]), settings)


class Served:
    """The command's own thread of work, over the stand-in."""

    def __init__(self, model: Path, executable: Path, **behaviour):
        self.model = model_in(model, **behaviour)
        listening = listen("127.0.0.1", 0)
        port = listening.getsockname()[1]
        self.settings = ServeSettings(port=port, api_keys=("a-long-key",), name="m", logs=self.model / "logs/serve")
        self.why: list[str] = []
        work = handover(flags_of(self.model, executable), self.settings)

        def run() -> None:
            with listening:
                self.why.append(run_handover(work, self.settings, listening, print, QUICK))

        self.thread = threading.Thread(target=run)
        self.thread.start()
        url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=url, headers={"Authorization": "Bearer a-long-key"}, timeout=120)
        self.wait(lambda: self.health()[0] == 200)

    def wait(self, holds, seconds: float = 120.0):
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until and self.thread.is_alive(), self.why
            time.sleep(0.02)

    def health(self):
        try:
            found = self.client.get("/health")
            return found.status_code, found.json()
        except httpx.HTTPError:
            return 0, {}

    def ask(self, prompt: str, **more):
        return self.client.post("/v1/completions", json={"model": "m", "prompt": prompt, "seed": 5, **more})

    def starts(self):
        return [json.loads(line) for line in (self.model / "starts.jsonl").read_text().splitlines()]

    def records(self):
        (file,) = (self.model / "logs/serve").glob("requests-*.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]

    def end(self):
        """As the command is ended when its engine has failed for good."""
        for start in self.starts():
            try:
                os.kill(start["pid"], signal.SIGKILL)
            except ProcessLookupError:
                pass


@pytest.fixture
def served(tmp_path, executable):
    opened = []

    def start(**behaviour):
        opened.append(Served(tmp_path / "model", executable, **behaviour))
        return opened[-1]

    yield start
    for one in opened:
        (one.model / "behaviour.json").write_text('{"good_starts": 0}')
        until = time.monotonic() + 60
        while one.thread.is_alive() and time.monotonic() < until:
            one.end()
            one.thread.join(0.2)
        assert not one.thread.is_alive()


def test_answers_records_metrics_and_launch_are_as_those_of_our_own_engine(served):
    server = served()
    whole = server.ask("hello")
    assert whole.status_code == 200 and whole.json()["choices"][0]["text"] == "a b"
    streamed = server.ask("hello", stream=True, temperature=0.5)
    events = [line for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert len(events) == 3 and events[-1] == "data: [DONE]", "the count that we asked for is not the client's"
    asked = server.ask("hello", stream=True, stream_options={"include_usage": True})
    assert '"usage"' in asked.text
    assert server.ask("bad").status_code == 400
    assert server.client.get("/v1/models").json()["data"][0]["id"] == "m"
    assert httpx.get(f"{server.client.base_url}/v1/models", timeout=120).status_code == 401, "our keys"
    assert server.client.post("/v1/completions", content=b"{").status_code == 415
    json_kind = {"Content-Type": "application/json"}
    assert server.client.post("/v1/completions", content=b"{", headers=json_kind).status_code == 400

    header, first, second, third = server.records()
    assert header["header"] and header["model"] == "m" and "tensor_parallel 1" in header["way"]
    assert (first["prompt_tokens"], first["answer_tokens"], first["finish"], first["seed"]) == (3, 2, "stop", 5)
    assert second["sampling"]["temperature"] == 0.5 and second["finish"] == "length" and third["answer_tokens"] == 2
    assert "prompt" not in first and 0 < second["timings"]["first_token_s"] <= second["timings"]["total_s"]
    page = server.client.get("/metrics").text
    assert 'outcore_answers_total{reason="length"} 2.0' in page and "outcore_answer_tokens_total 6.0" in page
    assert "outcore_time_to_first_token_seconds_count 3.0" in page and "vllm:num_requests_running" in page
    assert 'outcore_refused_requests_total{status="401"} 1.0' in page

    launch = server.client.get("/v1/launch").json()
    assert (launch["engine"], launch["world_size"], launch["tensor_parallel"]) == ("vllm", 1, 1)
    assert launch["stages"] == [{"gpus": [0], "layers": None}] and launch["zero"]["stage"] == 0
    assert header["tensor_parallel"] == 1
    refused = server.client.post("/v1/evaluations", json={"tasks": ["outcore_sums"]})
    assert refused.status_code == 409 and "local-completions" in refused.json()["error"]["message"]


def test_a_process_that_dies_or_hangs_is_started_again(served):
    server = served()
    for prompt in ("crash", "hang", "crash later"):
        pid, restarts = server.starts()[-1]["pid"], server.health()[1].get("restarts", 0)
        answer = server.ask(prompt, stream=prompt == "crash later")
        if prompt == "crash":
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_down"
        if prompt == "crash later":
            assert "engine_down" in answer.text and "[DONE]" not in answer.text
        server.wait(lambda n=restarts: server.health()[1].get("restarts", 0) > n and server.health()[0] == 200)
        assert server.ask("hello").status_code == 200
        assert server.starts()[-1]["pid"] != pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        told = re.search(r"outcore_engine_restarts (\d+)", server.client.get("/metrics").text)
        assert told and int(told[1]) > restarts
        assert server.records()[-1]["finish"] == "stop"


def test_who_waits_is_told_that_the_server_stops(served, monkeypatch):
    running, serve = [], uvicorn.Server.serve
    monkeypatch.setattr(uvicorn.Server, "serve", lambda self, **more: running.append(self) or serve(self, **more))
    server = served()
    with server.client.stream("POST", "/v1/completions", json={"prompt": "wait", "stream": True}) as streamed:
        lines = streamed.iter_lines()
        assert '"a"' in next(lines)
        running[0].should_exit = True
        rest = "".join(lines)
    assert "server_stopping" in rest and "[DONE]" not in rest
    server.thread.join(60)
    assert server.why == [""] and "The server stops" in server.records()[-1]["error"]


def test_a_client_that_goes_away_leaves_nothing_that_reads(served, caplog):
    server = served()
    with server.client.stream("POST", "/v1/completions", json={"prompt": "wait", "stream": True}) as streamed:
        assert '"a"' in next(streamed.iter_lines())
    server.wait(lambda: server.records()[-1].get("finish") == "cancelled")
    assert server.ask("hello").status_code == 200
    gc.collect()
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


def test_a_whole_answer_is_under_way_until_its_client_has_read_it(served):
    server = served()
    body = json.dumps({"prompt": "hello", "times": 8 << 20})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-long-key\r\n"
    head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.settings.port)) as client:
        client.sendall((head + body).encode())
        said = client.recv(100)
        assert said.startswith(b"HTTP/1.1 200") and server.health()[1]["running"] == 1
        while more := client.recv(1 << 20):
            said += more
    server.wait(lambda: server.health()[1]["running"] == 0)
    assert said.count(b"a b") == 8 << 20


def test_what_stops_coming_up_ends_the_hand_over_with_the_reason(served):
    server = served(good_starts=1)
    server.ask("crash")
    server.thread.join(120)
    assert len(server.why) == 1 and "out of memory" in server.why[0] and "exit code 1" in server.why[0]
    noted = (server.model / "logs/diagnostics/events.jsonl").read_text()
    assert [json.loads(line)["event"] for line in noted.splitlines()] == [
        "engine starting", "engine up", "engine restarted", "engine starting", "engine failed",
    ]  # fmt: skip


def test_when_vllm_does_not_come_up_our_own_engine_serves_with_a_warning(tmp_path, executable, capfd, monkeypatch):
    model = model_in(tmp_path / "model", good_starts=0)
    served = []
    monkeypatch.setattr("outcore.serve.main._serve", lambda args, settings, *more: served.append(settings.name))
    assert main(flags_of(model, executable, "--log_dir", str(tmp_path / "logs"))) == 0
    assert served == [str(model)]
    told = capfd.readouterr().err
    assert "warning: vLLM cannot serve this" in told and "out of memory" in told and "on one GPU" in told


HEALTHY = """
import http.server, os, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print("pid", os.getpid(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


@pytest.fixture
def engine(tmp_path):
    """A server that says no more than that it is well, by `Care` for a few deaths; what is noted of it; its pids."""
    port, noted = free_port(), []
    care = replace(QUICK, max_restarts=2)
    command, log = [sys.executable, "-S", "-c", HEALTHY, str(port)], tmp_path / "log"
    process = ServerProcess(command, {}, f"http://127.0.0.1:{port}", log, care, lambda event, **_: noted.append(event))
    yield process, noted, lambda: [int(pid) for pid in re.findall(r"^pid (\d+)$", log.read_text(), re.M)]
    process.stop()


def test_an_engine_that_dies_is_started_as_often_as_said_and_no_more(engine):
    process, noted, pids = engine
    over = threading.Event()
    process.bring_up()
    process.watch(over.set)
    for deaths in range(3):
        until(lambda n=deaths: noted.count("engine up") > n or over.is_set())
        os.kill(pids()[-1], signal.SIGKILL)
    assert over.wait(60) and noted.count("engine restarted") == 2 and len(pids()) == 3
    assert process.state == "failed" and "after 2 new starts" in process.why


def test_an_engine_ends_with_the_thread_that_started_it(engine):
    """So it ends with our process, too, however that ends."""
    process, _, pids = engine
    starting = threading.Thread(target=process.bring_up)
    starting.start()
    starting.join(120)
    until(lambda: Path(f"/proc/{pids()[0]}/stat").read_text().split()[2] == "Z")


def test_command_line_and_variables(tmp_path, executable):
    model = model_in(tmp_path / "model")
    argv = flags_of(
        model, executable, "--tensor_parallel", "2", "--pipeline_parallel", "2", "--stage_layers", "3,5",
        "--precision", "bf16", "--context", "512", "--max_sequences", "9",
    )  # fmt: skip
    found = handover(argv, ServeSettings(name="m", max_answer_tokens=77))
    command = found.command(Path("vllm"), 1234)
    assert command[:7] == ["vllm", "serve", str(model), "--host", "127.0.0.1", "--port", "1234"]
    said = dict(zip(command[7::2], command[8::2], strict=True))
    assert said == {
        "--served-model-name": "m", "--tensor-parallel-size": "2", "--pipeline-parallel-size": "2",
        "--dtype": "bfloat16", "--override-generation-config": '{"max_new_tokens": 77}', "--max-model-len": "512",
        "--max-num-seqs": "9",
    }  # fmt: skip
    variables = found.variables("secret")
    assert variables["CUDA_VISIBLE_DEVICES"] == "0,1,2,3" and variables["VLLM_PP_LAYER_PARTITION"] == "3,5"
    assert variables["TP_SIZE"] == "2" and variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert variables["VLLM_NO_USAGE_STATS"] == "1" and "secret" not in command


def test_stages_are_balanced_by_sizes_or_measured_costs(tmp_path, executable):
    model = model_in(tmp_path / "model")
    wide = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
            "num_attention_heads": 4, "vocab_size": 4096}  # fmt: skip
    (model / "config.json").write_text(json.dumps(wide))
    (model / "model.safetensors").write_bytes(b"")
    sizes = handover(flags_of(model, executable, "--pipeline_parallel", "2"), ServeSettings(name="m"))
    assert sizes.stage_layers == (4, 4), "embedding and head weigh alike"
    (model / "costs.json").write_text(json.dumps({"layers": [1.0] * 8, "last": 4.0}))
    more = ("--pipeline_parallel", "2", "--layer_costs", str(model / "costs.json"))
    assert handover(flags_of(model, executable, *more), ServeSettings(name="m")).stage_layers == (6, 2)


@pytest.mark.parametrize(("more", "words"), [
    (("--tensor_parallel", "4"), "would cross from the island"),
    (("--tensor_parallel", "8"), "needs 8 GPUs, and there are 4"),
    (("--pipeline_parallel", "2", "--stage_layers", "3"), "must be 2 numbers above 0"),
    (("--pipeline_parallel", "2", "--stage_layers", "3,x"), "must be 2 numbers above 0"),
    (("--kv_home", "ram"), "kv_home belongs to our own engine"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path, executable, capsys, more, words):
    model = model_in(tmp_path / "model")
    assert main(flags_of(model, executable, *more)) == 2
    assert words in capsys.readouterr().err
    assert not (model / "starts.jsonl").exists()


def test_groups_over_several_hosts_are_refused(tmp_path, executable):
    model = model_in(tmp_path / "model")
    argv = flags_of(model, executable, "--pipeline_parallel", "2")
    cluster_in(model, "hosts: [{name: a, gpus: 1}, {name: b, gpus: 1}]")
    with pytest.raises(ValueError, match="these groups lie on a, b"):
        handover(argv, ServeSettings(name="m"))


@pytest.mark.more
def test_environment_is_made_once_and_again_when_half_made(tmp_path):
    """A wheel of our own stands in for vllm's."""
    source = tmp_path / "vllm-1-py3-none-any.whl"
    with zipfile.ZipFile(source, "w") as wheel:
        wheel.writestr("vllm_stand_in.py", "def main(): print('here')\n")
        wheel.writestr("vllm-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 1\n")
        wheel.writestr("vllm-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("vllm-1.dist-info/entry_points.txt", "[console_scripts]\nvllm=vllm_stand_in:main\n")
        wheel.writestr("vllm-1.dist-info/RECORD", "")
    requirements, folder, said = tmp_path / "requirements.txt", tmp_path / "env", []
    requirements.write_text("anything\n")
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").write_text("#!/bin/sh\necho no such wheel\nexit 3\n")
    (folder / "bin/python").chmod(0o755)
    with pytest.raises(RuntimeError, match=r"could not install vLLM \(exit code 3\):\n  no such wheel"):
        ensure_environment(folder, said.append, python="true", requirements=requirements)
    requirements.write_text(f"{source}\n")
    made = ensure_environment(folder, said.append, requirements=requirements)
    assert subprocess.run([str(made)], capture_output=True, text=True).stdout == "here\n"
    assert ensure_environment(folder, said.append, requirements=requirements) == made and len(said) == 2
