"""The forecast of a run as it was decided."""

from outcore.plan.run.forecast import Forecast, Forecaster, drive_performance, write_combined_measured
