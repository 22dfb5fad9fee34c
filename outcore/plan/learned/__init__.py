"""What finished runs taught about forecasts on this machine."""

from outcore.plan.learned.rates import known_rates, remember_rates
from outcore.plan.learned.ratios import LEARNED, LEAST_STEPS, expected_s, kind_of, last_time, remember
