"""What a teacher says of the run's rows, kept on disk, and a student's loss by it.

The teacher is streamed: many rows at once go through its layers, so that its weights cross once for all of them. Of
each token that bears loss the `TOP` likeliest tokens are kept with their log-probabilities (256 B a token), chunk by
chunk in the folder of cached data; a pass that was stopped goes on with the next chunk, and another run over the same
rows finds them. The loss is the divergence KL(teacher || student) over these tokens and one for all others."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn import functional

import outcore.hf
from outcore.common import make_folder
from outcore.config import ConfigError
from outcore.data import RowDataset
from outcore.model import ModelSettings, load_model
from outcore.train.methods.address import IGNORED, TeacherServer, is_address
from outcore.train.run.job import RunJob

TOP = 32
CHUNK_ROWS = 64
"""Rows that go through the teacher at once, and lie in one file."""
HEAD_TOKENS = 1024
"""Tokens whose logits exist at once."""


class TaughtRows(torch.utils.data.Dataset):
    """Rows with what the teacher says of them."""

    def __init__(self, rows: RowDataset, folder: Path) -> None:
        self._rows, self._folder = rows, folder

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        batch = self._rows.batch([row])
        found = {"input_ids": batch["input_ids"][0], "labels": batch["labels"][0]}
        found["attention_mask"] = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[0]
        with safe_open(_file(self._folder, row // CHUNK_ROWS), "pt") as file:
            return found | {name: file.get_tensor(f"{name}.{row}") for name in ("tops", "logprobs")}


def taught(rows: RowDataset, teacher: ModelSettings, cache: Path, job: RunJob, tokenizer: Any) -> TaughtRows:
    """Ask the teacher about all rows that it was not asked about before. `tokenizer`: the student's."""
    name = str(teacher.model_name_or_path)
    server = TeacherServer(name) if is_address(name) else None
    asked = f"{name} {server.name}" if server else name
    digest = hashlib.sha256(f"{asked} {teacher.precision} {TOP}".encode())
    for row in range(len(rows)):
        for tokens in rows.documents_of(row):
            digest.update(tokens.tobytes() + b"|")
    folder = cache / "taught" / digest.hexdigest()[:16]
    left = [at for at in range(-(-len(rows) // CHUNK_ROWS)) if not _is_whole(_file(folder, at))]
    if not left:
        job.say(f"teacher: what it says of these {len(rows):,} rows is in {folder}")
        return TaughtRows(rows, folder)
    make_folder(folder)
    job.say(
        f"teacher: {teacher.model_name_or_path} reads {len(rows):,} rows, {len(left)} chunks of {CHUNK_ROWS} are left"
    )
    if server is not None:
        server.check_tokens(tokenizer.decode(rows.documents_of(0)[0], skip_special_tokens=True), tokenizer)
        said_of = server.said_of
    else:
        said_of = _by_streaming(teacher, len(tokenizer))
    for at in left:
        chunk = range(at * CHUNK_ROWS, min(len(rows), (at + 1) * CHUNK_ROWS))
        aside = _file(folder, at).with_suffix(f".{os.getpid()}")
        save_file(said_of(rows, chunk), aside)
        aside.replace(_file(folder, at))
    return TaughtRows(rows, folder)


def _by_streaming(teacher: ModelSettings, vocab_size: int) -> Callable[..., dict[str, torch.Tensor]]:
    model = load_model(teacher).model.eval().requires_grad_(False)
    if model.get_output_embeddings().weight.shape[0] < vocab_size:
        raise ConfigError(f"teacher: {teacher.model_name_or_path} knows fewer tokens than the student.")
    return partial(_said_of, outcore.hf.stream(model))


def _is_whole(chunk: Path) -> bool:
    """Whether a chunk was written to its end: opening it compares its header with its length."""
    try:
        with safe_open(chunk, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


@torch.no_grad()
def _said_of(model: Any, rows: RowDataset, chunk: Sequence[int]) -> dict[str, torch.Tensor]:
    batch = {name: tensor.to(model.device) for name, tensor in rows.batch(list(chunk)).items()}
    labels = batch.pop("labels")
    hidden_BTH = model.base_model(**batch, use_cache=False).last_hidden_state
    found: dict[str, torch.Tensor] = {}
    for number, row in enumerate(chunk):
        hidden_NH = hidden_BTH[number, :-1][labels[number, 1:] != IGNORED]
        parts = [_top(model, part) for part in hidden_NH.split(HEAD_TOKENS)]
        for name, tensors in zip(("tops", "logprobs"), zip(*parts, strict=True), strict=True):
            found[f"{name}.{row}"] = torch.cat(tensors).cpu()
    return found


def _top(model: Any, hidden_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model.get_output_embeddings()(hidden_NH).float()
    if cap := getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    values, tops = logits.log_softmax(-1).topk(min(TOP, logits.shape[-1]))
    return tops.to(torch.int32), values


def collate(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows padded on the right, and what the teacher says of their tokens one after the other."""
    pads = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    batch = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in pads.items()
    }
    return batch | {name: torch.cat([row[name] for row in rows]) for name in ("tops", "logprobs")}


def distillation_loss(model: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean over the tokens that bear loss, in nats; the same again, which an evaluation does not look at)."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    said_NV = logits[:, :-1][batch["labels"][:, 1:] != IGNORED].float().log_softmax(-1)
    ours_NK, theirs_NK = said_NV.gather(-1, batch["tops"].long()), batch["logprobs"]
    ours, theirs = (torch.cat([some, _rest(some)], dim=-1) for some in (ours_NK, theirs_NK))
    loss = functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    return loss, loss.detach()


def _rest(logprobs_NK: torch.Tensor) -> torch.Tensor:
    """Log-probability of all other tokens [N, 1]."""
    return torch.log1p(-logprobs_NK.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))


def student_rows(found: RowDataset | Any) -> RowDataset:
    """The rows of one source. ConfigError for a mixture, whose rows change from epoch to epoch."""
    if not isinstance(found, RowDataset):
        raise ConfigError("method distill: it takes one data set, without a weight.")
    return found


def _file(folder: Path, chunk: int) -> Path:
    return folder / f"chunk-{chunk:06d}.safetensors"
