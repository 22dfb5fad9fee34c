"""One evaluation from start to end, on this machine's engine or a server's."""

from outcore.evaluate.jobs.events import IDLE, Event, EventLog, progress_of, read_events
from outcore.evaluate.jobs.job import EVENTS, JOURNAL, Job, Subject, launch_of, subject_of, unfinished_or_new
