"""Two evaluations of the same documents, side by side: scores, which answers changed, and whether that is chance.

Where a document is right or wrong, the paired test is McNemar's, exact: of the documents that changed, how likely is a
split at least as uneven if either way were equally likely. Other metrics: a paired test of the mean difference, by the
normal distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outcore.evaluate.history.history import History

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """One metric of one task; `b` against `a`."""

    task: str
    metric: str
    filter: str
    a: float
    b: float
    """Scores: of shares over the documents that both have, of other metrics over all that each has."""
    difference: float
    """b - a; in points (hundredths) for shares such as accuracy, in per cent of a for others."""
    unit: str
    documents: int
    """Documents that both have."""
    changed: int
    """Documents whose value differs (for shares), or whose answer's log-probability does by more than 1e-3."""
    better: int
    worse: int
    p_value: float | None
    """P-value of the paired test; None: nothing was paired, or nothing changed."""
    max_logprob_difference: float | None
    """Largest difference of one answer's log-probability; None without any."""


def diff_of(history: History, first: Record, second: Record) -> dict[str, Any]:
    """Settings that differ, and every metric that both have."""
    settings: dict[str, list[Any]] = {}
    for part in ("settings", "launch", "versions"):
        for name in sorted({*first[part], *second[part]}):
            values = [first[part].get(name), second[part].get(name)]
            if values[0] != values[1]:
                settings[name] = values
    for name in ("model", "model_hash"):
        if first[name] != second[name]:
            settings[name] = [first[name], second[name]]
    tasks = compare(first["scores"], history.samples(first["id"]), second["scores"], history.samples(second["id"]))
    return {"a": first["id"], "b": second["id"], "settings": settings, "tasks": [asdict(one) for one in tasks]}


def compare(
    scores_a: Sequence[Record], samples_a: Sequence[Record], scores_b: Sequence[Record], samples_b: Sequence[Record]
) -> list[Comparison]:
    """Every metric that both have."""
    of_b = {(score["task"], score["metric"], score["filter"]): score for score in scores_b}
    documents_a, documents_b = _by_document(samples_a), _by_document(samples_b)
    found = []
    for score in scores_a:
        other = of_b.get((score["task"], score["metric"], score["filter"]))
        if other is None or score["value"] is None or other["value"] is None:
            continue
        place = (score["task"], score["filter"])
        mine, theirs = documents_a.get(place, {}), documents_b.get(place, {})
        pairs = [(mine[n], theirs[n]) for n in sorted(mine.keys() & theirs.keys())]
        found.append(_of_metric(score, other, pairs, len(mine) == len(theirs) == len(pairs)))
    return found


def _of_metric(score: Record, other: Record, pairs: Sequence[tuple[Record, Record]], is_whole: bool) -> Comparison:
    """`is_whole`: neither side has documents that the other lacks."""
    metric = score["metric"]
    values = [
        (float(a["metrics"][metric]), float(b["metrics"][metric]))
        for a, b in pairs
        if _is_number(a["metrics"].get(metric)) and _is_number(b["metrics"].get(metric))
    ]
    is_share = bool(values) and all(value in (0.0, 1.0) for pair in values for value in pair)
    up, down = sum(b > a for a, b in values), sum(b < a for a, b in values)
    if score["higher_is_better"] is False:
        up, down = down, up
    moved = [gap for a, b in pairs if (gap := _logprob_gap(a, b)) is not None]
    a, b = float(score["value"]), float(other["value"])
    if is_share and not is_whole:  # other documents say nothing of how the two differ
        a, b = (sum(side) / len(values) for side in zip(*values, strict=True))
    return Comparison(
        score["task"],
        metric,
        score["filter"],
        a,
        b,
        100 * (b - a) if is_share else 100 * (b - a) / abs(a) if a else math.inf if b else 0.0,
        "points" if is_share else "%",
        len(pairs),
        up + down if is_share else sum(gap > 1e-3 for gap in moved),
        up,
        down,
        (mcnemar(up, down) if is_share else paired(values)) if up + down else None,
        max(moved, default=None),
    )


def mcnemar(up: int, down: int) -> float:
    """Chance of a split at least as uneven, if either way were equally likely."""
    total, least = up + down, min(up, down)
    return min(1.0, 2 * sum(math.comb(total, k) for k in range(least + 1)) / 2**total)


def paired(values: Sequence[tuple[float, float]]) -> float | None:
    """Chance of a mean difference at least as large, by the normal distribution."""
    gaps = [b - a for a, b in values]
    if len(gaps) < 2:
        return None
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)
    if variance == 0:
        return 1.0 if mean == 0 else 0.0
    return math.erfc(abs(mean) / math.sqrt(variance / len(gaps)) / math.sqrt(2))


def _by_document(samples: Sequence[Record]) -> dict[tuple[str, str], dict[int, Record]]:
    found: dict[tuple[str, str], dict[int, Record]] = {}
    for one in samples:
        found.setdefault((one["task"], one["filter"]), {})[one["doc_id"]] = one
    return found


def _logprob_gap(a: Record, b: Record) -> float | None:
    """Gap of answers that are [log-probability, ...]; texts have none."""
    pairs = zip(a["answers"], b["answers"], strict=False)
    gaps = [abs(x[0] - y[0]) for x, y in pairs if isinstance(x, list) and isinstance(y, list)]
    return max(gaps, default=None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
