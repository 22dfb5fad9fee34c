"""Adding up the gradients of one unit over micro-batches and head chunks, in one flat buffer on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outcore.flow.parts import SlabLayout


class GradAccumulator:
    """Gradients of the layout's trainable range in `flat` (1-D, fp32 or the parameters' type, at least that long).

    The first gradient of each parameter is copied, later ones are added, in `flat`'s type. A parameter that got none
    counts as zero. `flat` is shared by units one after another: make a new accumulator for each."""

    def __init__(self, layout: SlabLayout, flat: torch.Tensor) -> None:
        self.layout = layout
        self.flat = flat[: layout.trainable_numel]
        self._views = layout.grad_views(self.flat)
        self._empty = [True] * len(self._views)
        for start, end in layout.gaps():
            self.flat[start:end].zero_()

    @torch.no_grad()
    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """`grads`: one per trainable slot; None where the parameter was not used."""
        first: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        later: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for index, (view, grad) in enumerate(zip(self._views, grads, strict=True)):
            if grad is not None:
                views, values = first if self._empty[index] else later
                views.append(view)
                values.append(grad)
                self._empty[index] = False
        if first[0]:
            torch._foreach_copy_(*first)  # pyright: ignore[reportPrivateImportUsage]
        if later[0]:
            torch._foreach_add_(*later)  # pyright: ignore[reportPrivateImportUsage]

    def sums(self) -> list[torch.Tensor]:
        """Views, one per trainable slot, for whoever adds to them himself; those without a gradient so far are zero."""
        if all(self._empty):
            self.flat.zero_()
        else:
            for view, is_empty in zip(self._views, self._empty, strict=True):
                if is_empty:
                    view.zero_()
        self._empty = [False] * len(self._views)
        return self._views

    def complete(self) -> torch.Tensor:
        """The sum [trainable_numel]; parameters without a gradient are zero in it."""
        for view, is_empty in zip(self._views, self._empty, strict=True):
            if is_empty:
                view.zero_()
        return self.flat
