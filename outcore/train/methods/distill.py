"""Probabilities of a teacher for the run's rows, kept on disk, and a student's loss by them.

The teacher is streamed: many rows at once go through its layers, so that its weights cross once for all of them. Of
each token that bears loss the `TOP` likeliest tokens are kept with their log-probabilities (256 B a token), chunk by
chunk in the folder of cached data, in the format of `outcore score --top_k`, whose file is taken in a teacher's place.
A pass that was stopped goes on with the next chunk, and another run over the same rows finds them. The loss is the
divergence KL(teacher || student) over these tokens and one for all others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import outcore.hf
from outcore.checkpoint.materials import base_material
from outcore.common import make_folder
from outcore.config import ConfigError
from outcore.config.fields import is_address
from outcore.data import DataError, RowDataset, ids_hash
from outcore.data.cache import HiddenTargets, Target, facts_of, write_targets
from outcore.model import ModelSettings, load_model
from outcore.sizing.streaming import READ_HEAD_TOKENS, READ_ROWS
from outcore.train.methods.address import IGNORED, TeacherServer
from outcore.train.run.job import RunJob

TOP = 32


class TaughtRows(torch.utils.data.Dataset):
    """Rows with what the teacher says of them. ConfigError where it says nothing of one."""

    def __init__(self, rows: RowDataset, files: Sequence[Path], where: str) -> None:
        self._rows, self._said = rows, HiddenTargets(files, rows.seq_length)
        for row in range(len(rows)):
            if not self._said.has(_tokens(rows, row)):
                raise ConfigError(
                    f"teacher: {where} says nothing of row {row + 1}: it has other tokens, or others bear loss. Make "
                    "the file by outcore score MODEL --input FILE --top_k 32 --output FILE.parquet, of whole rows."
                )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        batch, said = self._rows.batch([row]), self._said.find(_tokens(self._rows, row))
        assert said is not None
        found = {"input_ids": batch["input_ids"][0], "labels": batch["labels"][0]}
        found["attention_mask"] = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[0]
        tops, logprobs = (torch.from_numpy(values.copy()) for values in (said.top_ids, said.top_logprobs))
        return found | {"tops": tops, "logprobs": logprobs}


def taught(rows: RowDataset, teacher: ModelSettings, cache: Path, job: RunJob, tokenizer: Any) -> TaughtRows:
    """Ask the teacher about all rows that it was not asked about before. It is known by the content of its weights, or
    by its address and name. `tokenizer`: the student's."""
    name = str(teacher.model_name_or_path)
    server = TeacherServer(name) if is_address(name) else None
    model = f"{name} {server.name}" if server else base_material(name).content
    facts = {"model": model, "precision": teacher.precision, "top_k": TOP}
    digest = hashlib.sha256(json.dumps(facts).encode())
    for row in range(len(rows)):
        digest.update(_tokens(rows, row).tobytes() + b"|")
    folder = cache / "taught" / digest.hexdigest()[:16]
    files = [folder / f"chunk-{at:06d}.parquet" for at in range(-(-len(rows) // READ_ROWS))]
    left = [at for at, file in enumerate(files) if not _is_whole(file)]
    if not left:
        job.say(f"teacher: what it says of these {len(rows):,} rows is in {folder}")
        return TaughtRows(rows, files, str(folder))
    make_folder(folder)
    job.say(f"teacher: {name} reads {len(rows):,} rows, {len(left)} chunks of {READ_ROWS} are left")
    said_of = reader(teacher, tokenizer, tokenizer.decode(rows.documents_of(0)[0], skip_special_tokens=True))
    for at in left:
        chunk = range(at * READ_ROWS, min(len(rows), (at + 1) * READ_ROWS))
        write_targets(files[at], said_of(rows, chunk), facts)
    return TaughtRows(rows, files, str(folder))


def reader(teacher: ModelSettings, tokenizer: Any, text: str) -> Callable[..., Iterator[Target]]:
    """Open a teacher: a function of (rows, numbers of some of them) that gives what it says of these. ConfigError where
    it has other tokens than the student's `tokenizer`; a server is asked for those of `text`."""
    if is_address(name := str(teacher.model_name_or_path)):
        server = TeacherServer(name)
        server.check_tokens(text, tokenizer)
        return server.said_of
    return _by_streaming(teacher, len(tokenizer))


def _by_streaming(teacher: ModelSettings, vocab_size: int) -> Callable[..., Iterator[Target]]:
    model = load_model(teacher).model.eval().requires_grad_(False)
    if model.get_output_embeddings().weight.shape[0] < vocab_size:
        raise ConfigError(f"teacher: {teacher.model_name_or_path} knows fewer tokens than the student.")
    return partial(_said_of, outcore.hf.stream(model))


def taught_by_file(rows: RowDataset, file: Path, tokenizer: Any, job: RunJob) -> TaughtRows:
    """Take what `outcore score --top_k` wrote of these rows. ConfigError or DataError for another tokenizer or rows."""
    if facts_of(file).get("tokenizer") != ids_hash(tokenizer):
        raise ConfigError(f"teacher: {file} is by another tokenizer than the student's; they must be the same.")
    job.say(f"teacher: what it says of these {len(rows):,} rows is in {file}")
    return TaughtRows(rows, [file], str(file))


def _tokens(rows: RowDataset, row: int) -> np.ndarray:
    return np.concatenate(rows.documents_of(row))


def _is_whole(chunk: Path) -> bool:
    try:
        return bool(facts_of(chunk))
    except DataError:
        return False


@torch.no_grad()
def _said_of(model: Any, rows: RowDataset, chunk: Sequence[int]) -> Iterator[Target]:
    batch = {name: tensor.to(model.device) for name, tensor in rows.batch(list(chunk)).items()}
    labels = batch.pop("labels")
    hidden_BTH = model.base_model(**batch, use_cache=False).last_hidden_state
    for number, row in enumerate(chunk):
        bears_loss = labels[number, 1:] != IGNORED
        hidden_NH, own_N = hidden_BTH[number, :-1][bears_loss], labels[number, 1:][bears_loss]
        parts = zip(hidden_NH.split(READ_HEAD_TOKENS), own_N.split(READ_HEAD_TOKENS), strict=True)
        said = [torch.cat(part).cpu().numpy() for part in zip(*(_top(model, *p) for p in parts), strict=True)]
        yield Target(_tokens(rows, row), *said)


def _top(model: Any, hidden_NH: torch.Tensor, own_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = model.get_output_embeddings()(hidden_NH).float()
    if cap := getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    logprobs = logits.log_softmax(-1)
    values, tops = logprobs.topk(min(TOP, logits.shape[-1]))
    return logprobs.gather(-1, own_N[:, None])[:, 0], tops.to(torch.int32), values


def padded(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask and labels [rows, longest], padded on the right."""
    pads = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in pads.items()
    }


def collate(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows padded on the right, and what the teacher says of their tokens one after the other."""
    return padded(rows) | {name: torch.cat([row[name] for row in rows]) for name in ("tops", "logprobs")}


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
