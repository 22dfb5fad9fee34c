"""Products of the CPU in the middle of a GPU's work, with the host in between neither waiting nor launching.

A kernel writes activations to page-locked RAM and asks there for a task; a thread of the CPU that looks into that RAM
multiplies and answers; the kernel, which has waited, ends, and the next one reads the results. All of it is queued as
any other work of the stream is, so CUDA graphs hold it, and uploads are queued ahead meanwhile. A hand-over costs three
small kernels and a round trip to RAM beside the products, some 15 us (estimated). Cost: 24 MiB of page-locked RAM and a
thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outcore.common.quantities import KIB, MIB
from outcore.formats import PackedProducts
from outcore.staging.pool import device_view

X_BYTES, OUT_BYTES, BOX_ROOM = 8 * MIB, 16 * MIB, 4 * KIB
"""Room for activations, for results, and for the box before them."""

Ask = Callable[[torch.Tensor, torch.Tensor, int], None]
"""(box, turn, question): queues the question, behind which the stream waits for the answer."""


class HandOver:
    """Way of one device's activations to `products` and back. One stream at a time. RuntimeError or MemoryError where
    the device cannot ask."""

    def __init__(self, products: PackedProducts, device: torch.device, ask: Ask | None = None) -> None:
        self._products, self._device, self._ask = products, device, ask or _kernel()
        has_gpu = device.type == "cuda"
        self._host = torch.zeros(BOX_ROOM + X_BYTES + OUT_BYTES, dtype=torch.uint8, pin_memory=has_gpu)
        view = device_view(self._host, device) if has_gpu else self._host
        sizes = [BOX_ROOM, X_BYTES, OUT_BYTES]
        products.listen(*self._host.split(sizes))
        self._box, x, out = view.split(sizes)
        self._x, self._out = x.view(torch.float32), out.view(torch.float32)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._tasks: dict[tuple[tuple[int, int], ...], int] = {}

    def takes(self, num_rows: int, columns: int, results: int) -> bool:
        """Whether there is room for so many rows, of so many columns and results."""
        return num_rows * columns * 4 <= X_BYTES and num_rows * results * 4 <= OUT_BYTES

    def multiply(self, calls: Sequence[Any], rows: torch.Tensor) -> list[torch.Tensor]:
        """Rows [m, columns] times the weight of each call: [m, rows of the weight] on the device, in their type."""
        key = tuple((call.codes, call.rows) for call in calls)
        if key not in self._tasks:
            self._tasks[key] = self._products.task(calls)
        # Kernels and never copies, which would wait behind weights on their way: hence the products with one.
        torch.mul(rows, 1, out=self._x[: rows.numel()].view(rows.shape))
        self._ask(self._box, self._turn, PackedProducts.question(self._tasks[key], len(rows)))
        found, at = [], 0
        for call in calls:
            here = self._out[at : at + len(rows) * call.rows].view(len(rows), call.rows)
            found.append(torch.mul(here, 1, out=torch.empty_like(here, dtype=rows.dtype)))
            at += here.numel()
        return found


def _kernel() -> Ask:
    try:
        from outcore.flow.weights.ask_kernel import ask
    except ImportError as error:
        raise RuntimeError(f"the kernel that asks the CPU needs Triton ({error})") from error
    launch: Any = ask
    return lambda box, turn, task: launch[(1,)](box, turn, task, num_warps=1)
