"""Products of the CPU in the middle of a GPU's work, with the host in between neither waiting nor launching.

A kernel writes activations to page-locked RAM and asks there for a task; a thread of the CPU that looks into that RAM
multiplies and answers; the kernel, which has waited, ends, and the next one reads the results. All of it is queued as
any other work of the stream is, so CUDA graphs hold it, and uploads are queued ahead meanwhile. A hand-over costs three
small kernels and a round trip to RAM beside the products, some 15 us (estimated). Cost: 24 MiB of page-locked RAM and a
thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from outcore.common.quantities import KIB, MIB
from outcore.formats import PackedProducts
from outcore.staging.pool import device_view

X_BYTES, OUT_BYTES, BOX_ROOM = 8 * MIB, 16 * MIB, 4 * KIB
"""Room for activations, for results, and for the box before them."""


class Asks(Protocol):
    """How a stream asks. `turn`: a count, and what was asked for last."""

    def ask(self, box: torch.Tensor, turn: torch.Tensor, question: int, *, waits: bool) -> None:
        """Queue a question, behind which the stream waits for the answer, if it is to."""
        ...

    def wait(self, box: torch.Tensor, turn: torch.Tensor) -> None:
        """Have the stream wait for the answer to what it asked for last."""
        ...


class HandOver:
    """Way of one device's activations to `products` and back. One stream at a time. RuntimeError or MemoryError where
    the device cannot ask."""

    def __init__(self, products: PackedProducts, device: torch.device, asks: Asks | None = None) -> None:
        self.products, self._asks = products, asks or _Kernels()
        has_gpu = device.type == "cuda"
        self._host = torch.zeros(BOX_ROOM + X_BYTES + OUT_BYTES, dtype=torch.uint8, pin_memory=has_gpu)
        view = device_view(self._host, device) if has_gpu else self._host
        sizes = [BOX_ROOM, X_BYTES, OUT_BYTES]
        products.listen(*self._host.split(sizes))
        self._box, x, out = view.split(sizes)
        self._x, self._out = x.view(torch.float32), out.view(torch.float32)
        self._turn = torch.zeros(2, dtype=torch.int64, device=device)
        self._tasks: dict[tuple[tuple[int, int], ...], int] = {}

    def takes(self, num_rows: int, columns: int, results: int) -> bool:
        """Whether there is room for so many rows, of so many columns and results."""
        return num_rows * columns * 4 <= X_BYTES and num_rows * results * 4 <= OUT_BYTES

    def multiply(self, calls: Sequence[Any], rows: torch.Tensor) -> list[torch.Tensor]:
        """Rows [m, columns] times the weight of each call: [m, rows of the weight] on the device, in their type."""
        key = tuple((call.codes, call.rows) for call in calls)
        if key not in self._tasks:
            self._tasks[key] = self.products.task(calls)
        # Kernels and never copies, which would wait behind weights on their way: hence the products with one.
        torch.mul(rows, 1, out=self._x[: rows.numel()].view(rows.shape))
        self._asks.ask(self._box, self._turn, PackedProducts.question(self._tasks[key], len(rows)), waits=True)
        found, at = [], 0
        for call in calls:
            here = self._out[at : at + len(rows) * call.rows].view(len(rows), call.rows)
            found.append(torch.mul(here, 1, out=torch.empty_like(here, dtype=rows.dtype)))
            at += here.numel()
        return found

    def ask_chosen(self, task: int, rows: torch.Tensor, pairs: int) -> None:
        """Ask for a task of chosen weights (`PackedProducts.task_of_chosen`) and go on."""
        torch.mul(rows, 1, out=self._x[: rows.numel()].view(rows.shape))
        self._asks.ask(self._box, self._turn, PackedProducts.question(task, pairs), waits=False)

    def chosen(self, pairs: int, results: int) -> torch.Tensor:
        """Wait for what was asked for: fp32 [pairs, results] in the CPU's RAM, good until the next question. What was
        not for the CPU is undefined."""
        self._asks.wait(self._box, self._turn)
        return self._out[: pairs * results].view(pairs, results)


class _Kernels:
    """The GPU's own way."""

    def __init__(self) -> None:
        try:
            from outcore.flow.weights import ask_kernel
        except ImportError as error:
            raise RuntimeError(f"the kernel that asks the CPU needs Triton ({error})") from error
        self._kernels: Any = ask_kernel

    def ask(self, box: torch.Tensor, turn: torch.Tensor, question: int, *, waits: bool) -> None:
        self._kernels.ask[(1,)](box, turn, question, WAITS=waits, num_warps=1)

    def wait(self, box: torch.Tensor, turn: torch.Tensor) -> None:
        self._kernels.wait[(1,)](box, turn, num_warps=1)
