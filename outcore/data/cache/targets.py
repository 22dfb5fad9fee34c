"""Hidden targets: what a teacher says of documents, in a parquet file that any program reads.

A row is a document: `tokens` as training takes them, `has_loss` of each, and for every token from the second on that
bears loss `logprobs` (its own), `top_ids` and `top_logprobs` (the K likeliest ones at its place, one token's behind the
other's). The schema's metadata name the teacher and the tokenizer by their content. A file takes its name when it is
whole. Read by document: a row group of `GROUP` documents is in memory at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outcore.common.files import replacing
from outcore.data.basis import DataError
from outcore.data.cache.encode import NO_LOSS, carries_loss, token_ids

FACTS = b"outcore"
GROUP = 4
"""Documents that are read at once: rows are drawn at random."""


class Target(NamedTuple):
    """Probabilities of a teacher for one document."""

    tokens: np.ndarray
    """uint32 [T] with loss bits."""
    logprobs: np.ndarray
    """fp32 [N]: of the N tokens from the second on that bear loss, and at their places the likeliest ones:"""
    top_ids: np.ndarray
    """int32 [N, K]."""
    top_logprobs: np.ndarray
    """fp32 [N, K], natural logarithms."""


def write_targets(path: Path, targets: Iterable[Target], facts: dict[str, Any]) -> None:
    """Write a file of them, with `facts` about the teacher. OSError."""
    import pyarrow as pa
    from pyarrow import parquet

    types = {"tokens": pa.int64(), "has_loss": pa.bool_(), "logprobs": pa.float32()}
    types |= {"top_ids": pa.int32(), "top_logprobs": pa.float32()}
    schema = pa.schema([(name, pa.list_(kind)) for name, kind in types.items()], {FACTS: json.dumps(facts)})
    left = iter(targets)
    with replacing(path) as file, parquet.ParquetWriter(file, schema) as writer:
        while group := list(islice(left, GROUP)):
            rows = [
                (token_ids(one.tokens), carries_loss(one.tokens), one.logprobs, *(v.ravel() for v in one[2:]))
                for one in group
            ]
            columns = zip(zip(*rows, strict=True), schema.types, strict=True)
            arrays = [pa.array(list(column), kind) for column, kind in columns]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


class HiddenTargets:
    """Files of targets, looked up by document. `longest`: tokens that a row has at most, where documents were cut."""

    def __init__(self, files: Sequence[Path], longest: int) -> None:
        self._longest = longest
        self._places: dict[bytes, tuple[Path, int, int]] = {}
        self.facts: dict[str, Any] = {}
        for path in files:
            self.facts = facts_of(path)
            for number in range(_opened(path).num_row_groups):
                for row, tokens in enumerate(self._tokens(path, number)):
                    self._places.setdefault(_key(tokens[:longest]), (path, number, row))
        self._group = lru_cache(4)(lambda path, number: _opened(path).read_row_group(number))

    def has(self, tokens: np.ndarray) -> bool:
        """Whether something was said of a row with these tokens and loss bits."""
        return _key(tokens) in self._places

    def find(self, tokens: np.ndarray) -> Target | None:
        """Find the target of a row with these tokens and loss bits; None: there is none."""
        place = self._places.get(_key(tokens))
        if place is None:
            return None
        path, number, row = place
        table = self._group(path, number)
        said = [table.column(name)[row].values.to_numpy(zero_copy_only=False) for name in Target._fields[1:]]
        count = int(carries_loss(tokens[1:]).sum())
        logprobs, *tops = said
        tops = [values.reshape(len(logprobs), len(values) // max(1, len(logprobs)))[:count] for values in tops]
        return Target(tokens, logprobs[:count], tops[0], tops[1])

    def _tokens(self, path: Path, number: int) -> Iterator[np.ndarray]:
        table = _opened(path).read_row_group(number, ["tokens", "has_loss"])
        for ids, has_loss in zip(table.column("tokens"), table.column("has_loss"), strict=True):
            found = ids.values.to_numpy().astype(np.uint32)
            yield np.where(has_loss.values.to_numpy(zero_copy_only=False), found, found | NO_LOSS).astype(np.uint32)


def _key(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def facts_of(path: Path) -> dict[str, Any]:
    """Read what a file of targets says of its teacher. DataError for a file that is none, or was cut short."""
    import pyarrow as pa

    try:
        return json.loads((_opened(path).schema_arrow.metadata or {})[FACTS])
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(
            f"{path} is no file of a teacher's targets, or was cut short ({type(error).__name__}: {error}). "
            "Make one by outcore score MODEL --input FILE --top_k 32 --output FILE.parquet."
        ) from error


def _opened(path: Path) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(path)
