"""Schedule of the next pass: its sequences, chunks and guesses."""

from outcore.infer.schedule.cost import PassCost
from outcore.infer.schedule.drafts import Drafter
from outcore.infer.schedule.scheduler import ScheduleLimits, Scheduler, Work, rows_of
from outcore.infer.schedule.sequence import Clock, Sequence
