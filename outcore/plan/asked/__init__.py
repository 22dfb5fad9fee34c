"""What `outcore plan` answers to flags, for programs."""

from outcore.model import PRESETS
from outcore.plan.fields import PlanConfig, parse_plan
from outcore.plan.main import Asked, answer_to
