"""Reports of a server on itself: numbers for Prometheus, a record of each answer, the plan beside what passes took."""

from outcore.serve.watch.metrics import RequestMetrics, ServeMetrics
from outcore.serve.watch.records import Records, header_of
