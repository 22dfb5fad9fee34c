"""Answers of `outcore plan` to flags, for programs."""

from outcore.model import PRESETS
from outcore.plan.fields import PlanConfig, check_planned, parse_plan
from outcore.plan.main import Asked, AskedAnswers, answer_to, answers_to, method_answer
