"""Stands in for `outcore serve` and `outcore train`: quick to start, as slow, failing or mortal as a test asks.

python pretender.py serve --port=N --api_key_file=FILE ... -- MODEL    MODEL: quick | slow | missing
python pretender.py train ...                                       sleeps until SIGINT, then exits 130
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

WORDS = [f"word{number} " for number in range(1000)]
CONTEXT = 2000
METRICS = b"""# HELP x
outcore_kv_bytes 4096
outcore_weight_bytes{home="ram"} 12
outcore_kv_pages{group="all",state="free"} 6
outcore_kv_pages{group="all",state="used"} 2
"""


class Handler(BaseHTTPRequestHandler):
    key = ""
    launch: ClassVar[dict[str, Any]] = {}
    ending = threading.Event()

    def do_GET(self):
        if not self._allowed():
            return
        if self.path == "/metrics":
            self._send(200, METRICS, "text/plain")
        elif self.path == "/v1/launch":
            self._send(200, json.dumps({"world_size": 1, **self.launch}).encode())
        else:
            self._send(200, json.dumps({"data": [{"id": "m", "owned_by": "outcore"}]}).encode())

    def do_POST(self):
        if not self._allowed():
            return
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        count = sum(len(m["content"]) for m in body["messages"])
        if self.path == "/tokenize":
            self._send(200, json.dumps({"count": count, "max_model_len": CONTEXT}).encode())
            return
        if count > CONTEXT:
            error = {"message": f"The prompt has too many tokens, and the context is {CONTEXT}. Shorten it."}
            self._send(400, json.dumps({"error": error}).encode())
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        said = body["messages"][-1]["content"]
        words = [said.removeprefix("say ")] if said.startswith("say ") else WORDS
        count = int(body.get("max_tokens", 3))
        self._event({"choices": [{"delta": {"reasoning_content": "I think."}, "finish_reason": None}]})
        for word in words[:count]:
            if self.ending.is_set():
                self._event({"error": {"message": "The server stops.", "code": "server_stopping"}})
                return
            self._event({"choices": [{"delta": {"content": word}, "finish_reason": None}]})
            time.sleep(0.02)
        self._event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 10, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 5}}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, chunk):
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def _allowed(self):
        if self.headers.get("authorization") == f"Bearer {self.key}":
            return True
        self._send(401, b"{}")
        return False

    def _send(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def main():
    argv = sys.argv[1:]
    if argv[0] == "train":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a run does; in the background it is ignored
        try:
            print("training", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            sys.exit(130)
    model, flags = argv[-1], dict(word.removeprefix("--").split("=", 1) for word in argv[1:-2])
    if model == "missing":
        print("outcore serve: missing is not a folder here and no hub id either.", flush=True)
        sys.exit(1)
    print(f"reading {model}", flush=True)
    time.sleep(float(os.environ.get("PRETENDER_LOADS_S", 0)))
    if model == "slow":
        time.sleep(600)
    Handler.key = Path(flags["api_key_file"]).read_text()
    if "engine" in flags:
        degrees = {name: int(flags[name]) for name in ("tensor_parallel", "pipeline_parallel")}
        world_size = degrees["tensor_parallel"] * degrees["pipeline_parallel"]
        Handler.launch = {"engine": flags["engine"], "world_size": world_size, **degrees}
    server = ThreadingHTTPServer(("127.0.0.1", int(flags["port"])), Handler)
    server.daemon_threads = False  # its end waits for answers, which are told

    def end(*_):
        Handler.ending.set()
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, end)
    with server:
        server.serve_forever()


if __name__ == "__main__":
    main()
