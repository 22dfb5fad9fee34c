"""Lessons of finished runs about forecasts on this machine."""

from outcore.plan.learned.ratios import (
    LEARNED,
    LEAST_STEPS,
    expected_s,
    kind_of,
    known_rates,
    last_time,
    remember,
    remember_rates,
)
