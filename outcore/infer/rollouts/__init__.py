"""Answers of a model that is being trained, by this room's engine over the trainer's own weights."""

from outcore.infer.rollouts.engine import PAGE_TOKENS, group_pages, groups_of_answers, streamed_engine
