"""A run's numbers: metrics.jsonl and who else is told."""

from outcore.monitor.metrics.log import MetricsLog, MetricsLogError, StartupClock
from outcore.monitor.metrics.loggers import Logger, LoggerGroup, check_report_to, make_loggers
from outcore.monitor.metrics.reader import Metrics, numbers, plot_loss, read_metrics
from outcore.monitor.metrics.server import MetricsServer
