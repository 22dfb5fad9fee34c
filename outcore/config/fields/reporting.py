"""Evaluation, logging, checkpoints: fields of the settings; each docstring is the text of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.config.spec import setting


@dataclass(frozen=True)
class ReportingFields:
    """Evaluation, logging, checkpoints."""

    run_name: str | None = setting(None, common=True)
    """Name of the run's folders. Default: <model>-<data>, with a number when that run exists."""
    eval_steps: int | None = setting(None, least=0)
    """Evaluate every so many steps; 0 only at the end. Default: a fifth of the run."""
    sample_steps: int | None = setting(None, least=0)
    """Write a sample every so many steps; 0 only at the end. Default: as eval_steps."""
    sample_prompt: str | None = None
    """Prompt of the samples. Default: "def "."""
    sample_tokens: int = setting(48, least=0)
    """Tokens of a sample; 0: no samples."""
    logging_steps: int = setting(1, above=0)
    """Print a line every so many steps; metrics.jsonl has every step."""
    save_steps: int | None = setting(None, least=0, common=True)
    """Save a checkpoint every so many steps; 0 only at the end. Default: a fifth of the run."""
    save_strategy: Literal["steps", "no"] = "steps"
    """no: never write a checkpoint, not even at the end or when stopped (for measurements)."""
    save_total_limit: int = setting(2, above=0, common=True)
    """Keep this many checkpoints; the newest complete one is never removed."""
    resume_from_checkpoint: str | None = setting(None, common=True)
    """`auto` or a checkpoint folder. auto: the complete checkpoint of the run that was saved, or gone back to, last;
    what it left behind by going back to an earlier one does not count, whatever its step."""
    checkpoint_dir: str = setting("checkpoints", common=True)
    """Where checkpoints go: <checkpoint_dir>/<run>/step-00000123."""
    log_dir: str = "logs"
    """Where metrics.jsonl, loss.png, plan.json and TensorBoard files go: <log_dir>/<run>."""
    export_dir: str = "final_model"
    """Where the finished model goes: <export_dir>/<run>."""
    report_to: str = setting("tensorboard", common=True)
    """Comma-separated: tensorboard, trackio, wandb, none."""
    metrics_port: int | None = setting(None, least=0, most=65535)
    """Serve the run's figures for Prometheus on this port of the loopback interface (0: any free one)."""
    plan: bool = setting(False, common=True)
    """Print the forecast for this run on this machine and stop: exit code 0 when it fits, 1 when it does not. No
    weights are loaded, nothing is trained."""
    trace: int = setting(0, bare="2", least=0)
    """Record a timeline of this many steps (alone: 2), after two of warm-up, as <log_dir>/<run>/trace.json."""
    export: bool = True
    """Write the finished model at the end."""
