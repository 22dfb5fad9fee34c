"""Evaluation, logging, checkpoints: fields of the settings; each docstring is the text of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.config.spec import setting


@dataclass(frozen=True)
class ReportingFields:
    """Evaluation, logging, checkpoints."""

    run_name: str | None = setting(None, common=True, aliases=("name",))
    """Name of the run's folders. Default: <model>-<data>, with a number when that run exists."""
    eval_steps: int | None = setting(None, least=0)
    """Evaluate every N steps; 0 only at the end. Default: a fifth of the run, and at least 10 steps."""
    sample_steps: int | None = setting(None, least=0)
    """Write a sample every N steps; 0 only at the end. Default: as eval_steps."""
    sample_prompt: str | None = None
    """Prompt of the samples. Default: "def "."""
    sample_tokens: int = setting(48, least=0)
    """Tokens of a sample; 0: no samples."""
    logging_steps: int = setting(1, above=0)
    """Print a line every N steps; metrics.jsonl has every step."""
    save_steps: int | None = setting(None, least=0, common=True)
    """Save a checkpoint every N steps; 0 only at the end. Default: a fifth of the run."""
    save_strategy: Literal["steps", "epoch", "no"] = "steps"
    """epoch: save after each pass over the data. no: never write a checkpoint, not even at the end or when stopped."""
    eval_strategy: Literal["steps", "epoch", "no"] = setting("steps", aliases=("evaluation_strategy",))
    """epoch: evaluate after each pass over the data. no: never."""
    save_total_limit: int = setting(2, above=0, common=True)
    """Keep this many checkpoints; the newest complete one and the best are never removed."""
    load_best_model_at_end: bool = setting(False, common=True)
    """Save whenever an evaluation is the best so far, and export that model instead of the last."""
    metric_for_best_model: Literal["eval_loss", "eval_perplexity", "loss"] = setting(
        "eval_loss", words={"perplexity": "eval_perplexity"}
    )
    """Metric to compare, lower being better: eval_loss, eval_perplexity, or the training loss at each evaluation."""
    early_stopping_patience: int | None = setting(None, above=0, common=True)
    """Stop after N evaluations in a row that were no better than the best before; implies
    load_best_model_at_end."""
    early_stopping_threshold: float = setting(0.0, least=0)
    """Amount by which an evaluation must be better than the best before for the run to go on; a better one by less is
    kept as the best all the same."""
    resume_from_checkpoint: str | None = setting(None, common=True, aliases=("resume",))
    """`auto` or a checkpoint folder. auto: the complete checkpoint of the run that was saved, or gone back to, last;
    what it left behind by going back to an earlier one does not count, whatever its step."""
    continue_with_changes: bool = setting(False, common=True)
    """When resuming: go on with another length, learning rate, schedule, batch or data than the checkpoint's. Weights
    and moments are kept, the schedule is stated anew; without it a resumed run must be exactly the same."""
    checkpoint_dir: str = setting("checkpoints", common=True)
    """Folder of checkpoints: <checkpoint_dir>/<run>/step-00000123."""
    log_dir: str = "logs"
    """Folder of logs: metrics.jsonl, loss.png, plan.json and TensorBoard files go: <log_dir>/<run>."""
    export_dir: str = "final_model"
    """Folder of the finished model: <export_dir>/<run>."""
    report_to: str = setting("tensorboard", names=True, common=True)
    """Comma-separated: tensorboard, trackio, wandb, mlflow, none."""
    metrics_port: int | None = setting(None, least=0, most=65535)
    """Serve the run's figures for Prometheus on this port of the loopback interface (0: any free one)."""
    plan: bool = setting(False, common=True)
    """Print the forecast for this run on this machine and stop: exit code 0 when it fits, 1 when it does not. No
    weights are loaded, nothing is trained."""
    trace: int = setting(0, bare="2", least=0)
    """Record a timeline of this many steps (alone: 2), after three of warm-up, as <log_dir>/<run>/trace.json."""
    export: bool = True
    """Write the finished model at the end."""
    push_to_hub: str | None = setting(None, aliases=("hub_model_id",))
    """Upload the exported model to this repository of the Hugging Face hub (ORG/NAME; made private when it is new)."""
