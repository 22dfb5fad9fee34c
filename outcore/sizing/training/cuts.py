"""How much of each part's parameters lives in RAM where the drive has the rest."""

from __future__ import annotations

from outcore.sizing.training.needs import PartNeeds, TrainingNeeds


def cut_homes(
    needs: TrainingNeeds, ram_bytes: int | None, grain_numel: int, whole: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """Bytes of each part (of `needs.parts`) in RAM, from its beginning, at most `ram_bytes` in all (None: all of them).

    Embedding and head come first, then every layer has the same. `whole`: numbers of parts that must live in RAM. They,
    and what a mostly frozen part trains, may exceed the budget."""
    homes = [part.home_bytes for part in needs.parts]
    if ram_bytes is None:
        return tuple(homes)
    num_layers, e = len(needs.layers), needs.element_bytes
    cuts = [_least(part, e) for part in needs.parts]
    for number in whole:
        cuts[number] = homes[number]
    left = ram_bytes - sum(cuts)

    def extend(number: int, budget_bytes: int) -> None:
        nonlocal left
        cut, reach = cuts[number], cuts[number] + max(0, budget_bytes)
        grain_bytes = grain_numel * e
        new = homes[number] if reach >= homes[number] else max(cut, reach // grain_bytes * grain_bytes)
        cuts[number] = new
        left -= new - cut

    for number in range(num_layers, len(homes)):
        extend(number, left)
    short = sorted(range(num_layers), key=lambda number: homes[number] - cuts[number])
    for place, number in enumerate(short):
        extend(number, left // (num_layers - place))
    for number in range(num_layers):  # what rounding to the grain left over
        extend(number, min(left, 2 * grain_numel * e - 1))
    return tuple(cuts)


def _least(part: PartNeeds, element_bytes: int) -> int:
    trained = element_bytes * part.trained
    return trained if 2 * trained < part.home_bytes else 0
