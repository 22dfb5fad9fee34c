"""vLLM brought up, served in front of, and ended."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from outcore.common.diagnostics import DiagnosticLog
from outcore.common.ports import free_port
from outcore.infer.opening import model_hash
from outcore.serve.handover.command import ENVIRONMENT, Handover
from outcore.serve.handover.environment import ensure_environment
from outcore.serve.settings import ServeSettings

if TYPE_CHECKING:
    from outcore.serve.handover.process import Care


def run_handover(
    handover: Handover, settings: ServeSettings, listening: socket, say: Callable[[str], None], care: Care | None = None
) -> str:
    """Serve at `listening`, which stays open, until the process is told to end; '' then. Where vLLM does not come up,
    or fails for good, why."""
    # Here, because the command's flags are read also where the packages for serving are missing.
    from outcore.serve.handover.process import Care, ServerProcess
    from outcore.serve.handover.proxy import Forwarder, create_proxy
    from outcore.serve.stopping import Server
    from outcore.serve.watch import Records, RequestMetrics

    for line in handover.lines:
        say(line)
    events = DiagnosticLog(settings.logs.parent / "diagnostics")
    key, port = secrets.token_hex(16), free_port()
    log = settings.logs / f"vllm-{time.strftime('%Y%m%d-%H%M%S')}.log"
    try:
        executable = handover.executable or ensure_environment(ENVIRONMENT, say)
        process = ServerProcess(
            handover.command(executable, port),
            handover.variables(key),
            f"http://127.0.0.1:{port}",
            log,
            care or Care(start_timeout_s=handover.start_timeout_s),
            events.note,
        )
        say(f"vLLM starts; its log: {log}")
        try:
            process.bring_up()
            records = Records(settings.logs, _header(handover, settings, executable), with_text=settings.record_text)
            app = create_proxy(Forwarder(process, key, settings, RequestMetrics(), records), _launch(handover))
            server = Server(app)
            process.watch(lambda: setattr(server, "should_exit", True))
            say(f"records: {records.path}")
            say(f"listening on http://{settings.host}:{listening.getsockname()[1]}/v1 as {settings.name!r}")
            server.run(sockets=[listening.dup()])  # uvicorn closes what it is given
            return process.why if process.state == "failed" else ""
        finally:
            process.stop()
    except (RuntimeError, OSError) as error:
        events.note("engine failed", why=str(error))
        return str(error)


def _launch(handover: Handover) -> dict[str, object]:
    return {"model_hash": model_hash((handover.model,)), **handover.launch()}


def _header(handover: Handover, settings: ServeSettings, executable: Path) -> dict[str, object]:
    layout = handover.layout
    return {
        "model": settings.name,
        "found": handover.model,
        "way": f"vllm, tensor_parallel {layout.tensor_parallel}, pipeline_parallel {layout.pipeline_parallel}",
        "executable": str(executable),
        **_launch(handover),
    }
