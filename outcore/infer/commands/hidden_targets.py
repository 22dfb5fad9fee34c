"""`outcore score --top_k K --output FILE.parquet`: what a model says of documents, for students that learn from it.

Documents are encoded as training encodes them, so that the same rows are found there. A document that is done is noted
in a journal beside the output: a kill loses those of the group under way, and the same command goes on. Cost: 11 bytes
of journal for each likeliest token, and 8 in the file, which is written from it when all are there."""

from __future__ import annotations

import argparse
import base64
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outcore.checkpoint.materials import base_material
from outcore.common.output import say
from outcore.common.quantities import counted
from outcore.data import ids_hash
from outcore.data.cache import DocumentEncoder, Target, carries_loss, token_ids, write_targets
from outcore.data.rows import ChatExample, TextExample
from outcore.infer.commands.journal import Journal, digest_of
from outcore.infer.opening import OpenedModel

MOST_TOP = 1024
GROUP_VALUES = 1 << 22
"""Log-probabilities that a group of documents has at most, beside one document: 50 MB."""
TYPES = {"tokens": np.uint32, "logprobs": np.float32, "top_ids": np.int32, "top_logprobs": np.float32}


def check_targets(args: argparse.Namespace) -> None:
    """ValueError for flags that cannot be."""
    if args.token_logprobs:
        raise ValueError("--token_logprobs does nothing beside --top_k: the file has each token's own. Leave it out.")
    if args.output is None or args.output.suffix.lower() != ".parquet":
        raise ValueError("--top_k goes with --output FILE.parquet.")
    if not 1 <= args.top_k <= MOST_TOP:
        raise ValueError(f"--top_k must be a whole number from 1 to {MOST_TOP}.")


def tell_targets(args: argparse.Namespace, opened: OpenedModel, texts: Sequence[Any]) -> int:
    """Score all documents that no journal has, and write the file. Exit code."""
    tokenizer, engine = opened.found.tokenizer, opened.engine
    top_k = min(args.top_k, engine.speech.vocab_size)
    examples = [one if isinstance(one, ChatExample) else TextExample(one[1], one[0] or None) for one in texts]
    documents = [DocumentEncoder(tokenizer).encode(example) for example in examples]
    engine.check_texts([token_ids(one).tolist() for one in documents])  # all of them, before hours of work
    model = [_content_of(folder) for folder in map(Path, opened.found.folders)]
    facts = {"model": model, "top_k": top_k, "tokenizer": ids_hash(tokenizer), "precision": str(args.precision)}
    journal = Journal(args.output, facts | {"input": digest_of(args.input)})
    try:
        left = [number for number in range(len(documents)) if number not in journal.done]
        if len(left) < len(documents):
            say(f"{counted(len(documents) - len(left), 'document')} of the journal, {len(left):,} left")
        for group in _groups(left, documents, top_k):
            scores = engine.score_top([token_ids(documents[n]).tolist() for n in group], max(2, top_k))
            for number, of_text in zip(group, scores, strict=True):
                mask = carries_loss(documents[number][1:])
                values = (of_text.logprobs, of_text.top_ids[:, :top_k], of_text.top_logprobs[:, :top_k])
                journal.add(number, _packed(Target(documents[number], *(value.numpy()[mask] for value in values))))
        results = (json.loads(line) for line in journal.results(len(documents)))
        total, count = 0.0, 0

        def targets() -> Iterator[Target]:
            nonlocal total, count
            for result in results:
                target = _unpacked(result, top_k)
                total, count = total + float(target.logprobs.sum(dtype=np.float64)), count + len(target.logprobs)
                yield target

        write_targets(args.output, targets(), facts)
        journal.drop()
    finally:
        journal.close()
    perplexity = math.exp(-total / count) if count else None
    print(json.dumps({"texts": len(documents), "tokens": count, "logprob": total, "perplexity": perplexity}))
    return 0


def _content_of(folder: Path) -> str:
    """Hash of the weights of a run's checkpoint, an adapter, or a published model."""
    found = [folder / name for name in ("manifest.json", "adapter_model.safetensors") if (folder / name).is_file()]
    return digest_of(found[0]) if found else base_material(str(folder)).content


def _groups(left: list[int], documents: Sequence[np.ndarray], top_k: int) -> Iterator[list[int]]:
    group: list[int] = []
    for number in left:
        if group and sum(len(documents[n]) for n in [*group, number]) * top_k > GROUP_VALUES:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _packed(target: Target) -> dict[str, str]:
    values = zip(TYPES.items(), target, strict=True)
    return {name: base64.b64encode(np.asarray(value, kind).tobytes()).decode() for (name, kind), value in values}


def _unpacked(result: dict[str, str], top_k: int) -> Target:
    tokens, logprobs, *tops = (np.frombuffer(base64.b64decode(result[name]), kind) for name, kind in TYPES.items())
    return Target(tokens, logprobs, *(value.reshape(-1, top_k) for value in tops))
