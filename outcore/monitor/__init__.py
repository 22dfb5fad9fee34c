"""What the machine feels, and what the run says about itself: samplers, metrics.jsonl, loggers, progress, plots.

Nothing here may stop or slow a run: missing sensors are null and explained once, failing loggers are switched off with
one sentence; only metrics.jsonl raises (MetricsLogError), because a run without its log should stop cleanly.
"""

from __future__ import annotations

from outcore.monitor.loss_plot import plot_loss
from outcore.monitor.metrics_log import MetricsLog, MetricsLogError
from outcore.monitor.metrics_reader import Metrics, read_metrics
from outcore.monitor.progress import Progress
from outcore.monitor.sampler import Sampler

__all__ = ["Metrics", "MetricsLog", "MetricsLogError", "Progress", "Sampler", "plot_loss", "read_metrics"]
