"""From the command line to a finished run, as a table of contents.

`assemble` settles, decides and builds; `finish` trains, evaluates, saves and exports. `goal` says what is done with a
run that is ready: train it to its end, or, for a performance test, only try it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from outcore.common import explain_error
from outcore.common.hub import stay_offline
from outcore.common.output import watch_reader
from outcore.config import ConfigError, TrainConfig
from outcore.engine.deepspeed import watch_launcher
from outcore.monitor.metrics import StartupClock
from outcore.train.configure import parse_config
from outcore.train.run.assemble import Ready, assemble, settle, show_plan
from outcore.train.run.finish import train_to_end
from outcore.train.run.job import RunJob
from outcore.train.run.telling import TOLD, plain_words, tell

Goal = Callable[[Ready], int]


def run(job: RunJob, goal: Goal) -> int:
    """The whole story of our own loop; the process's exit code."""
    if job.config.method != "sft" and not job.config.plan:
        raise ConfigError(f"method {job.config.method}: only `outcore train` runs it.")
    settings, model = settle(job)
    if job.config.plan:
        return show_plan(job, settings, model)
    with job.opened:
        return goal(assemble(job, settings, model))


def start(config: TrainConfig, *, began_s: float | None = None) -> RunJob:
    """The job of this process, before anything of it is made."""
    clock = StartupClock(began_s)
    watch_launcher(config.local_rank)
    named = (config.model_name_or_path, config.tokenizer_name_or_path, config.eval_dataset, *config.dataset)
    stay_offline(named, print)
    return RunJob(config, clock)


def main(argv: Sequence[str] | None = None, goal: Goal = train_to_end) -> int:
    """Parse a command line and run; `run_config` says what the exit code means."""
    try:
        config = parse_config(argv)
    except ConfigError as error:
        tell(error, None)
        return 2
    return run_config(config, goal)


def run_config(
    config: TrainConfig,
    goal: Goal = train_to_end,
    *,
    began_s: float | None = None,
    story: Callable[[RunJob], int] | None = None,
) -> int:
    """Run what the settings say, and turn failures into one clear paragraph and an exit code.

    `began_s`: time.perf_counter before this module was imported; without it imports are not among the start's parts.
    `story`: what runs in place of our own loop.

    0 done; 1 the run failed (checkpoints intact); 2 wrong input; 128 + signal when stopped and saved.
    """
    job: RunJob | None = None
    watch_reader(ends=False)  # a run must not end because nobody reads along
    try:
        if config.train_vision is not None and goal is train_to_end:
            from outcore.train.vision import train_vision

            return train_vision(config)
        job = start(config, began_s=began_s)
        return run(job, goal) if story is None else story(job)
    except (*TOLD, KeyboardInterrupt) as error:
        tell(error, job)
        if isinstance(error, KeyboardInterrupt):
            return 130
        return 2 if isinstance(plain_words(error, job) or error, ValueError) else 1
    except Exception as error:  # libraries in Rust raise plain ones that only quote the system's number
        words = explain_error(error, job.phase if job is not None else "starting")
        if words is None:
            raise
        print(f"error: {words}", file=sys.stderr, flush=True)
        return 1
