"""Several sources with weights, prepared one by one and mixed: `a.jsonl`, `qa.csv:0.3`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outcore.data.basis import DataError, DataSettings
from outcore.data.layout import MixedRows
from outcore.data.prepare import PreparedData, prepare_data
from outcore.data.summary import DataSummary

_WEIGHT = re.compile(r"(.+):(\d+(?:\.\d*)?|\.\d+)")


@dataclass(frozen=True)
class WeightedSource:
    """A source and how often its rows are seen in an epoch."""

    name: str
    weight: float = 1.0


def weighted_source(text: str) -> WeightedSource:
    """`qa.csv:0.3` taken apart; a file that is really called so is one. DataError for a weight of 0."""
    match = _WEIGHT.fullmatch(text)
    if match is None or Path(text).expanduser().exists():
        return WeightedSource(text)
    weight = float(match.group(2))
    if not weight > 0:
        raise DataError(f"dataset {text!r}: a weight must be above 0 (0.3: three tenths of the rows; 2: each twice)")
    return WeightedSource(match.group(1), weight)


def prepare_mixture(
    settings: DataSettings, sources: Sequence[WeightedSource], tokenizer: Any, say: Callable[[str], None], **how: Any
) -> PreparedData:
    """Prepare as `prepare_data` does, for each source with the same settings, then one mixture. One source of weight
    1 is itself."""
    if len(sources) == 1 and sources[0].weight == 1:
        return prepare_data(replace(settings, dataset=sources[0].name), tokenizer, say=say, **how)
    prepared = [prepare_data(replace(settings, dataset=s.name), tokenizer, say=say, **how) for s in sources]
    counted = prepared if settings.eval_dataset is None else prepared[:1]  # the same beside each: it counts once
    evaluations = [p.eval for p in counted if p.eval is not None]
    parts = tuple(p.train for p in prepared)
    train = MixedRows(parts, tuple(source.weight for source in sources), settings.seed)  # pyright: ignore[reportArgumentType]
    evaluation = None
    if evaluations:
        evaluation = MixedRows(tuple(evaluations), (1.0,) * len(evaluations), settings.seed)  # pyright: ignore[reportArgumentType]
    for one in prepared:
        for line in one.summary.lines():
            say(line)
    names = [f"{source.name}{f':{source.weight:g}' if source.weight != 1 else ''}" for source in sources]
    summary = _summed([one.summary for one in prepared], train, names, len(evaluation) if evaluation is not None else 0)
    samples = dict.fromkeys(one.sample_text for one in prepared)
    return replace(prepared[0], train=train, eval=evaluation, summary=summary, sample_text="\n\n".join(samples))


def _summed(summaries: list[DataSummary], train: MixedRows, names: list[str], eval_rows: int) -> DataSummary:
    total = max(1.0, sum(train.tokens_by_source))
    shares = [
        f"{name} {tokens / total:.0%} of the tokens ({taken:,} rows an epoch)"
        for name, tokens, taken in zip(names, train.tokens_by_source, train.taken, strict=True)
    ]
    counted = ("documents", "tokens", "loss_tokens", "bad_rows", "empty_documents")
    counted += ("truncated_documents", "dropped_documents", "split_documents")
    sums = {name: sum(getattr(summary, name) for summary in summaries) for name in counted}
    notices: Counter[str] = Counter()
    unused: Counter[str] = Counter()
    for summary in summaries:
        notices.update(summary.notices)
        unused.update(summary.unused_columns)
    return replace(
        summaries[0],
        **sums,
        notices=dict(notices),
        end_tokens=sorted({token for summary in summaries for token in summary.end_tokens}),
        unused_columns=dict(unused),
        loss_shares=[sum(tenth) for tenth in zip(*(summary.loss_shares for summary in summaries), strict=True)],
        loss_tokens_range={
            "least": min(summary.loss_tokens_range.get("least", 0) for summary in summaries),
            "most": max(summary.loss_tokens_range.get("most", 0) for summary in summaries),
        },
        source="mixture",
        shape=" + ".join(dict.fromkeys(summary.shape for summary in summaries)),
        max_token_id=max(summary.max_token_id for summary in summaries),
        train_rows=len(train),
        train_tokens=train.total_tokens,
        eval_rows=eval_rows,
        padding_share=train.padding_share,
        cache_hit=all(summary.cache_hit for summary in summaries),
        notes=[f"mixed: {'; '.join(shares)}"],
    )
