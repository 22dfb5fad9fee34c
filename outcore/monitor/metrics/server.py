"""MetricsServer: the latest figures of a run for Prometheus, at http://HOST:PORT/metrics.

Standard library only, one daemon thread; asked for by --metrics_port and bound to the loopback address unless told
otherwise (it has no password). It takes the same calls as a logger. A port that is taken is said once; the run goes on.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from outcore.monitor.sensors import describe

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Metrics whose values only grow over a run; all others are gauges. Summed here from the figures per step.
_SUMMED = ("nvme_read_bytes", "nvme_write_bytes")
_LABELS = {"phase_s": "phase"}
_HELP = {
    "step": "Optimizer steps done.",
    "loss": "Training loss of the last step, nats per token.",
    "eval_loss": "Loss of the last evaluation, nats per token.",
    "tokens": "Tokens trained on.",
    "tokens_per_s": "Tokens per second in the last step.",
    "step_s": "Seconds of the last step.",
    "phase_s": "Seconds of the last step by phase.",
    "gpu_mem_bytes": "GPU memory in use, all processes.",
    "pcie_rx_gb_per_s": "PCIe host to device, GB/s.",
    "pcie_tx_gb_per_s": "PCIe device to host, GB/s.",
    "nvme_read_bytes_total": "Bytes read from the watched drives during the run.",
    "nvme_write_bytes_total": "Bytes written to the watched drives during the run.",
}


class MetricsServer:
    """Serves the run's figures.

    Args:
        port: 1 to 65535, or 0 for any free one (`port` tells which).
        host: the address to bind.
        run: value of the label "run" of every figure.
        say: takes one sentence: where it serves, or why it does not.

    Raises:
        ValueError: a port out of range."""

    def __init__(
        self, port: int, host: str = "127.0.0.1", *, run: str = "", say: Callable[[str], None] = print
    ) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"metrics_port must be between 1 and 65535 (0: any free one), got {port}.")
        self._lock = threading.Lock()
        self._figures: dict[str, Any] = {}
        self._run = run
        self._server: _Server | None = None
        self.port = port
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            say(
                f"No metrics are served: {host}:{port} cannot be opened ({error.strerror or describe(error)}). Another "
                "program may use the port: choose another --metrics_port. Training goes on."
            )
            return
        self._server.render = self.render
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="outcore-metrics", daemon=True).start()
        is_local = host in ("127.0.0.1", "localhost", "::1")
        reach = "" if is_local else " (anyone who reaches this address can read it)"
        say(f"Metrics for Prometheus: http://{host}:{self.port}/metrics{reach}")

    def log_header(self, header: dict[str, Any]) -> None:
        """Takes the run's name for the label, if none was given."""
        self._run = self._run or str(header.get("run") or "")

    def log(self, group: str, record: dict[str, Any]) -> None:
        """The figures of a metrics line become what is served; the step's number is that of the last step."""
        with self._lock:
            if group == "eval":
                record = {name: value for name, value in record.items() if name != "step"}
            for name in _SUMMED if group == "train" else ():
                self._figures[f"{name}_total"] = self._figures.get(f"{name}_total", 0) + (record.get(name) or 0)
            self._figures.update({name: value for name, value in record.items() if name not in _SUMMED})

    def render(self) -> str:
        """Prometheus' text format, version 0.0.4; figures that are not known are left out."""
        with self._lock:
            figures = dict(self._figures)
        lines: list[str] = []
        for name, value in figures.items():
            samples = _samples(name, value, self._run)
            if samples:
                kind = "counter" if name.endswith("_total") else "gauge"
                help_text = _HELP.get(name, f"{name} of the metrics line.")
                lines += [f"# HELP outcore_{name} {help_text}", f"# TYPE outcore_{name} {kind}", *samples]
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Stop serving; may be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    render: Callable[[], str]


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # type: ignore[assignment]
    timeout = 10

    def do_GET(self) -> None:
        if self.path.split("?")[0] not in ("/", "/metrics"):
            self.send_error(404, "see /metrics")
            return
        body = self.server.render().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: requests every few seconds would drown the run's own lines."""


def _samples(name: str, value: Any, run: str) -> list[str]:
    labels = {"run": run} if run else {}
    if name == "throttle" and isinstance(value, list):
        return [_sample(name, {**labels, "reason": str(reason)}, 1) for reason in value]
    if isinstance(value, dict) and name in _LABELS:
        numbers = {key: number for key, number in value.items() if _is_number(number)}
        return [_sample(name, {**labels, _LABELS[name]: key}, number) for key, number in numbers.items()]
    return [_sample(name, labels, value)] if _is_number(value) else []


def _sample(name: str, labels: dict[str, str], value: Any) -> str:
    text = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
    number = "NaN" if math.isnan(value) else ("+Inf" if value == math.inf else "-Inf" if value == -math.inf else value)
    return f"outcore_{name}{{{text}}} {number}" if text else f"outcore_{name} {number}"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
