"""What the machine feels, and what the run says about itself: samplers, metrics.jsonl, loggers, progress, warnings.

Nothing here may stop or slow a run: missing sensors are null and explained once, failing loggers are switched off with
one sentence; only metrics.jsonl raises (MetricsLogError), because a run without its log should stop cleanly.
"""

from __future__ import annotations

from outcore.monitor.metrics.log import MetricsLog, MetricsLogError
from outcore.monitor.metrics.loggers import Logger, LoggerGroup, NullLogger, check_report_to, make_loggers
from outcore.monitor.metrics.loss_plot import plot_loss
from outcore.monitor.metrics.reader import Metrics, read_metrics
from outcore.monitor.metrics.server import MetricsServer
from outcore.monitor.screen.progress import Progress
from outcore.monitor.sensors.sampler import Sampler
from outcore.monitor.watches.memory import MemoryWatch
from outcore.monitor.watches.run_warnings import RunWarnings
from outcore.monitor.watches.sleep_hold import SleepHold, hold_off_sleep
from outcore.monitor.watches.space import SpaceWatch, Verdict

__all__ = [
    "Logger",
    "LoggerGroup",
    "MemoryWatch",
    "Metrics",
    "MetricsLog",
    "MetricsLogError",
    "MetricsServer",
    "NullLogger",
    "Progress",
    "RunWarnings",
    "Sampler",
    "SleepHold",
    "SpaceWatch",
    "Verdict",
    "check_report_to",
    "hold_off_sleep",
    "make_loggers",
    "plot_loss",
    "read_metrics",
]
