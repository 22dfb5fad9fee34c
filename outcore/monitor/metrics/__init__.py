"""A run's numbers: metrics.jsonl and who else is told."""

from outcore.monitor.metrics.log import MetricsLog, MetricsLogError
from outcore.monitor.metrics.loggers import Logger, LoggerGroup, check_report_to, make_loggers
from outcore.monitor.metrics.loss_plot import plot_loss
from outcore.monitor.metrics.reader import Metrics, numbers, read_metrics
from outcore.monitor.metrics.server import MetricsServer
from outcore.monitor.metrics.startup_clock import StartupClock
