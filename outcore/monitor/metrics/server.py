"""MetricsServer: the latest figures of a run for Prometheus, at http://HOST:PORT/metrics.

prometheus-client serves them from a daemon thread; asked for by --metrics_port and bound to the loopback address unless
told otherwise (it has no password). It takes the same calls as a logger. A port that is taken is said once; the run
goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outcore.monitor.sensors import describe

# Metrics whose values only grow over a run; all others are gauges. Summed here from the figures per step.
_SUMMED = ("nvme_read_bytes", "nvme_write_bytes")
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


class MetricsServer(Collector):
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
        self._server: Any = None
        self.port = port
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, host, registry)
        except OSError as error:
            say(
                f"No metrics are served: {host}:{port} cannot be opened ({error.strerror or describe(error)}). Another "
                "program may use the port: choose another --metrics_port. Training goes on."
            )
            return
        self.port = int(self._server.server_port)
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

    def collect(self) -> Iterator[Metric]:
        """Figures for one answer; those that are not known are left out."""
        with self._lock:
            figures = dict(self._figures)
        for name, value in figures.items():
            samples = _samples(name, value)
            if not samples:
                continue
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            keys = tuple(samples[0][0])
            metric = kind(f"outcore_{name}", _HELP.get(name, f"{name} of the metrics line."), labels=("run", *keys))
            for labels, number in samples:
                metric.add_metric((self._run, *labels.values()), number)
            yield metric

    def close(self) -> None:
        """Stop serving; may be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


def _samples(name: str, value: Any) -> list[tuple[dict[str, str], float]]:
    """(labels beside the run's, number) of one figure."""
    if name == "throttle" and isinstance(value, list):
        return [({"reason": str(reason)}, 1) for reason in value]
    if name == "phase_s" and isinstance(value, dict):
        return [({"phase": phase}, number) for phase, number in value.items() if _is_number(number)]
    return [({}, value)] if _is_number(value) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
