"""One evaluation from start to end, on this machine's engine or a server's."""

from outcore.evaluate.jobs.job import JOURNAL, PROGRESS, Job, Subject, launch_of, subject_of, unfinished_or_new
from outcore.evaluate.jobs.progress import IDLE, Event, JobProgress, progress_of
