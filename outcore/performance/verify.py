"""`outcore verify RUN`: steps of a run, taken again from a checkpoint before them. Are the bits the same?

The main job resumes the run, in folders of its own beside the run's, which are removed at the end; of the run nothing
is written. Loss and gradient norm of each step are compared with its log and, where the run kept a checkpoint of the
last one, every tensor, the random state and the position in the data. Exit code: 0 the same bits, 1 others or damage,
2 a run whose steps cannot be repeated."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outcore.checkpoint import Checkpoint, CheckpointError, ShardReader, list_checkpoints, open_checkpoint
from outcore.common.output import say, tell_error
from outcore.common.quantities import counted
from outcore.config import ConfigError, TrainConfig, checked
from outcore.config.commands import verify_flags
from outcore.model import named_model
from outcore.monitor.metrics import read_metrics
from outcore.train.run import Ready, run_config

SHARD = re.compile(r"([^/]+)-\d+-of-\d+\.safetensors")
STATE = ("engine", "data", "random", "tokens_seen", "first_loss", "last_loss")
"""Entries of the loop's state that are compared."""


@dataclass(frozen=True)
class StepsAgain:
    """Steps to take again: a goal of the main job."""

    start: Checkpoint
    recorded: Mapping[int, Mapping[str, Any]]
    """Lines of the log, by their step, up to the last one that is taken."""
    kept: Checkpoint | None
    """Checkpoint that the run saved at that step."""

    def __call__(self, ready: Ready) -> int:
        """Take the steps and say how they compare; the exit code."""
        trainer, last = ready.trainer, max(self.recorded)
        trainer.resume(self.start)
        batches, differs = iter(trainer.parts.stream), ""
        while trainer.step < last and not differs:
            result, line = trainer.train_one(batches), self.recorded.get(trainer.step, {})  # a log may have gaps
            for name in ("loss", "grad_norm"):
                was, now = repr(line.get(name)), repr(getattr(result, name))  # in words: nan is nan
                if name in line and was != now:
                    differs = differs or f"{name} of step {trainer.step} was {was} and is {now}"
        if self.kept is not None and not differs:
            trainer.save()
            assert trainer.saved_path is not None
            differs = next(different(self.kept, open_checkpoint(trainer.saved_path)), "")
        trainer.parts.progress.close()
        what = "every tensor of its checkpoint" if self.kept else "losses and gradient norms (no checkpoint was kept)"
        steps = counted(trainer.step - self.start.step, "step")
        if differs:
            say(f"outcore verify: not the same bits: {differs}.")
            return 1
        print(f"the same bits: {steps} from {self.start.path} to step {last}; {what} compared")
        return 0


def different(kept: Checkpoint, again: Checkpoint) -> Iterator[str]:
    """Name what differs between two checkpoints of one step."""
    stems = {match[1] for name in (*kept.files(""), *again.files("")) if (match := SHARD.fullmatch(name))}
    for stem in sorted(stems):
        was, now = ShardReader(kept.path, stem), ShardReader(again.path, stem)
        for name in sorted({*was.names(), *now.names()}):
            if name not in was or name not in now:
                yield f"{stem} of {name} is in one of the two checkpoints only"
            elif not torch.equal(*(reader.read(name).reshape(-1).view(torch.uint8) for reader in (was, now))):
                yield f"{stem} of {name} in {was.file_of(name)}"
    states = kept.trainer_state(), again.trainer_state()
    yield from (f"{name} in {kept.path}" for name in STATE if states[0].get(name) != states[1].get(name))


def prepare(run: Path, checkpoint_dir: Path, log_dir: Path, step: int | None) -> tuple[TrainConfig, StepsAgain]:
    """The run's settings, and what to take again. ValueError where there is nothing to start from, CheckpointError for
    damage."""
    folder = run if list_checkpoints(run) else checkpoint_dir / run
    metrics = read_metrics(log_dir / folder.resolve().name / "metrics.jsonl")
    recorded = {line["step"]: line for line in metrics.steps}
    if "config" not in metrics.header or not recorded:
        raise ValueError(f"{metrics.path}: says no settings and no steps of a run. `outcore runs` lists what is here.")
    last = max(recorded) if step is None else step
    if last not in recorded:
        raise ValueError(f"--step {last}: the log has steps {min(recorded)} to {max(recorded)}: name one of these.")
    saved: list[Path] = []
    for path in reversed(list_checkpoints(folder)):  # those of a way that the run has left come last
        if saved and path.name >= saved[-1].name:
            break
        saved.append(path)
    steps = {path: open_checkpoint(path, verify=False).step for path in saved}
    start = next((path for path in saved if steps[path] < last), None)
    if start is None:
        raise ValueError(
            f"{folder} has no checkpoint before step {last} to start from; it has {_words(sorted(steps.values()))}. "
            "--step names a later step; --save_total_limit keeps more of them in a new run."
        )
    kept = next((path for path in saved if steps[path] == last), None)
    found = StepsAgain(
        open_checkpoint(start),
        {number: line for number, line in recorded.items() if steps[start] < number <= last},
        kept and open_checkpoint(kept),
    )
    for checkpoint in filter(None, (found.start, found.kept)):
        if checkpoint.damaged_export:
            raise CheckpointError(f"{checkpoint.path}: {checkpoint.damaged_export[0]}")
    if method := found.start.trainer_state().get("method"):
        raise ConfigError(f"{folder} is of a run by {method}: only its trainer takes its steps.")
    if (ranks := found.start.trainer_state()["world_size"]) > 1:
        raise ConfigError(f"{folder} was trained by {ranks} processes: one cannot take its steps again.")
    config = checked(TrainConfig, metrics.header["config"], named_model)
    _say_what_changed(metrics.header, config)
    return config, found


def _words(steps: list[int]) -> str:
    return f"those of {', '.join(map(str, steps))}" if steps else "none"


def _say_what_changed(header: Mapping[str, Any], config: TrainConfig) -> None:
    """Facts that may give other bits with nothing damaged."""
    from importlib.metadata import version

    from outcore import __version__

    facts = {"outcore": __version__, "threads": torch.get_num_threads()}
    for name, was in {**header.get("versions", {}), "threads": header.get("machine", {}).get("threads")}.items():
        now = facts[name] if name in facts else version(name) if name in ("torch", "transformers") else was
        if now != was is not None:
            print(f"note: the run was made with {name} {was}, this is {now}: other bits need not be damage")
    if torch.cuda.is_available() and not config.deterministic:
        print("note: the run was not --deterministic: on a GPU last bits differ from one time to the next")


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    args = verify_flags().parse_args(argv)
    try:
        config, verification = prepare(args.run, args.checkpoint_dir, args.log_dir, args.step)
        root = verification.start.path.resolve().parents[1]  # the drive that has room for such a run
        with tempfile.TemporaryDirectory(prefix=".verify-", dir=root) as folder:
            config = replace(
                config,
                **dict.fromkeys(("checkpoint_dir", "log_dir", "export_dir"), folder),
                run_name="verify",
                resume_from_checkpoint=str(verification.start.path),
                report_to="none",
                continue_with_changes=False,
                metrics_port=None,
                push_to_hub=None,
                trace=0,
            )
            return run_config(config, verification)
    except (CheckpointError, ValueError, OSError) as error:
        return tell_error("verify", error)
