"""What finished runs taught about forecasts on this machine."""

from outcore.plan.learned.ratios import LEAST_STEPS, kind_of, last_time, remember
