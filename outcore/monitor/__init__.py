"""Monitoring of the machine and the run: samplers, metrics.jsonl, loggers, progress, warnings.

Nothing here may stop or slow a run: missing sensors are null and explained once, failing loggers are switched off with
one sentence; only metrics.jsonl raises (MetricsLogError), because a run without its log should stop cleanly."""

from outcore.monitor.metrics import (
    Logger,
    LoggerGroup,
    Metrics,
    MetricsLog,
    MetricsLogError,
    MetricsServer,
    check_report_to,
    make_loggers,
    plot_loss,
    read_metrics,
)
from outcore.monitor.screen.progress import RunProgress
from outcore.monitor.sensors import Sampler
from outcore.monitor.watches import MemoryWatch, RunWarnings, SleepHold, SpaceVerdict, SpaceWatch, hold_off_sleep
