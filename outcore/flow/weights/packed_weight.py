"""Weights, packed or 16-bit, in the place of a module's parameters: few rows are multiplied by the bytes, where they
are.

The model's own code calls `F.linear` with such a weight, picks one expert of a stack, or (gpt-oss) multiplies by a
transposed one; torch hands these calls over. For few rows kernels read the packed bytes, on the CPU or, if the bytes
are there, on the GPU; up to how many rows that pays is measured. For more rows, and for any other use of the weight,
its values are expanded for the call, which gives the bits of a layer that was expanded whole. A GPU hands its
activations to the CPU (`HandOver`) once for all weights that a layer multiplies them with. The first pass shows which
these are.

Products of the CPU in the middle of a GPU's work, with the host in between neither waiting nor launching.

A kernel writes activations and a question to page-locked RAM and waits. A CPU thread that polls this RAM multiplies and
answers. Then the kernel ends, and the next one reads the results. All of it is ordinary work of the stream, so CUDA
graphs can hold it, and uploads are queued ahead meanwhile. A hand-over costs three small kernels and a round trip to
RAM beside the products, some 15 us (estimated). Cost: 24 MiB of page-locked RAM and a thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from outcore.common.quantities import KIB, MIB
from outcore.flow.parts import Part, Slot, cpu_specs
from outcore.formats import DeviceProducts, PackedProducts, PackedSpec, call_of, device_products, stack_of
from outcore.staging.pool import SmallCopies, device_view

X_BYTES, OUT_BYTES, BOX_ROOM = 8 * MIB, 16 * MIB, 4 * KIB
"""Room for activations, for results, and for the box before them."""


class Asks(Protocol):
    """Scratch requests of a stream. `turn`: their count, and the last one."""

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
        """Whether the box has room for a question of `num_rows` rows and its answer."""
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
        """Wait for the answer to `ask_chosen`: fp32 [pairs, results] in the CPU's RAM, valid until the next question.
        Rows of pairs that the CPU did not compute are undefined."""
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


class InPlaceProducts:
    """Products with weights where they are, in RAM or on the device. `most_rows`: rows up to which the CPU's kernels
    are taken, by name of the format (none: never); `device`: where the layers' activations are; `hand_over`: their way
    to the CPU, where that is a GPU; `device_tokens`: tokens of a pass up to which parts on the device are multiplied as
    they are there."""

    EXPANDED_NUMEL = 1 << 27
    """Values of a large matrix that a GPU expands at a time: 256 MiB in 16 bits."""

    def __init__(
        self,
        products: PackedProducts | None,
        most_rows: Mapping[str, int],
        device: torch.device,
        hand_over: HandOver | None = None,
        device_tokens: int = 0,
    ) -> None:
        self.most_rows, self.device, self.device_tokens = dict(most_rows), device, device_tokens
        self.expanded_numel = sys.maxsize if device.type == "cpu" else self.EXPANDED_NUMEL
        """Values of a matrix that are expanded at a time."""
        self.is_exact = False
        """Whether values are expanded for every product: where results must not depend on the number of rows."""
        self._products, self.hand_over, self._copies = products, hand_over, SmallCopies(device)
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self._held: PackedWeight | None = None
        """The weight whose values stand there, on a CPU: a head is used again and again, by some tokens after others.
        On a GPU a graph that found them there would not bring them back."""
        self._given: tuple[PackedWeight, torch.Tensor, torch.Tensor | None] | None = None
        """Last hand-over: the first weight, the activations, and their values where that is to be learnt
        from."""
        self._results: dict[int, torch.Tensor] = {}
        """Results of it that nobody has asked for yet, by weight."""

    def takes(self, weight: PackedWeight, num_rows: int) -> bool:
        """Whether the CPU's kernels multiply this many rows with the weight."""
        if self.is_exact or weight.call is None or num_rows > self.most_rows[weight.spec.format.name]:
            return False
        return self.hand_over is None or self.hand_over.takes(num_rows, weight.call.columns, weight.call.rows)

    def takes_pairs(self, weight: PackedWeight, num_rows: int, pairs: int) -> bool:
        """Whether the CPU's kernels multiply this many rows, each with a matrix of a stack that it chose."""
        if self.is_exact or self._products is None or self.device.type != "cpu":
            return False
        has_kernel = PackedProducts.can(PackedSpec(weight.spec.format, weight.spec.shape[1:]))
        most_rows = self.most_rows.get(weight.spec.format.name, 0)
        return has_kernel and num_rows <= most_rows and pairs <= PackedProducts.MOST_PAIRS

    def chosen(self, stack: Any, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """x [P / K, columns] times the weights `numbers` [P] of a stack (`stack_of`): [P, rows], in the type of x."""
        assert self._products is not None
        return self._products.multiply_chosen(stack, x, numbers, len(numbers) // max(1, len(x))).to(x.dtype)

    def takes_all(self, part: Part) -> bool:
        """Whether there are kernels for every weight of a part that stays on the CPU: then a CUDA graph can hold its
        work."""
        return all(PackedProducts.can(spec) for spec in cpu_specs(part) if spec is not None)

    def is_there(self, part: Part) -> bool:
        """Whether a part that is on the device is multiplied as it is there: packed on a GPU, 16-bit on a CPU."""
        return self.multiplies(part) or (self.device.type == "cpu" and any(map(self._takes_plain, cpu_specs(part))))

    def _takes_plain(self, spec: PackedSpec | None) -> bool:
        return spec is not None and spec.format.is_plain and spec.format.name in self.most_rows

    @staticmethod
    def multiplies(part: Part) -> bool:
        """Whether a GPU has kernels for all packed weights of a part that is there: linear layers' are."""
        fit = [
            len(spec.shape) == 2
            and not spec.is_transposed
            and DeviceProducts.can(spec)
            and all(isinstance(module, torch.nn.Linear) for module, _ in owners)
            for slot, owners in zip(part.layout.slots, part.owners, strict=True)
            if (spec := slot.packed) is not None
        ]
        return bool(fit) and all(fit)

    def product(self, weight: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., columns] times the packed rows, plus bias [rows]: [..., rows] in the type of x, where x is."""
        rows = x.reshape(-1, x.shape[-1])
        if not len(rows):
            return x.new_empty((*x.shape[:-1], weight.spec.shape[0]))
        if weight.is_on_device and len(rows) <= self.device_tokens and not self.is_exact:
            found = device_products(self.device).multiply(weight.spec, weight.planes, rows)
            return (found if bias is None else found.add_(bias)).view(*x.shape[:-1], -1)
        if not self.takes(weight, len(rows)):
            return self._expanded_product(weight, rows, bias).view(*x.shape[:-1], -1)
        if self.hand_over is None:
            assert self._products is not None
            found = self._products.multiply(weight.call, rows.to("cpu", torch.float32)).to(x.dtype)
        else:
            found = self._handed_over(self.hand_over, weight, x, rows)
        return (found if bias is None else found.add_(bias)).view(*x.shape[:-1], -1)

    def _expanded_product(self, weight: PackedWeight, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Rows times the values of the weight, on a GPU of a large one (a vocabulary's) of some of its rows after
        others."""
        if weight.spec.format.is_plain:
            return F.linear(rows, weight.expanded(), bias)
        spec, total = weight.spec, weight.spec.shape[0]
        step = max(1, self.expanded_numel // spec.shape[1])
        if total <= step or spec.is_transposed:
            value = self._room(spec.value_shape, weight.dtype)
            if self._held is not weight:
                weight.expanded(value)
            self._held = weight if self.device.type == "cpu" else None
            return F.linear(rows, value.t() if spec.is_transposed else value, bias)
        found = rows.new_empty(len(rows), total)
        for first in range(0, total, step):
            last = min(total, first + step)
            value = weight.some(first, last).expanded(self._room((last - first, spec.shape[1]), weight.dtype))
            found[:, first:last] = F.linear(rows, value, None if bias is None else bias[first:last])
        return found

    def _handed_over(
        self, hand_over: HandOver, weight: PackedWeight, x: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Rows times the weight, and times those that are known to want the same rows next."""
        first, given, values = self._given or (None, None, None)
        if first is not None and x is given:
            if id(weight) in self._results:
                return self._results.pop(id(weight))
            if values is not None and first.followers is not None and torch.equal(values, rows):
                first.followers.append(weight)
            return hand_over.multiply([weight.call], rows)[0]
        together = [weight]
        for other in weight.followers or ():
            num_results = other.call.rows + sum(one.call.rows for one in together)
            if self.takes(other, len(rows)) and hand_over.takes(len(rows), 0, num_results):
                together.append(other)
        found = hand_over.multiply([one.call for one in together], rows)
        self._given = weight, x, rows.clone() if weight.followers is None else None
        self._results = {id(other): result for other, result in zip(together[1:], found[1:], strict=True)}
        weight.followers = weight.followers or []
        return found[0]

    def tensors(self, part: Part, home: torch.Tensor) -> list[torch.Tensor]:
        """Tensors in place of a part's parameters, in slot order, from the bytes of its home in RAM or on the device:
        weights that are computed where they are, views of the rest (copies where the device is another)."""
        found, dtype, in_ram = list[torch.Tensor](), part.dtype, home.device.type == "cpu"
        for slot, spec in zip(part.layout.slots, cpu_specs(part), strict=True):
            if spec is not None and (slot.packed is not None or (in_ram and self._takes_plain(spec))):
                found.append(self._weight(slot, spec, dtype, home))
                continue
            value = home.view(dtype)[slot.home_offset : slot.home_offset + slot.numel].view(slot.shape)
            found.append(value if home.device == self.device else self._copies.to(value))
        return found

    def _weight(self, slot: Slot, spec: PackedSpec, dtype: torch.dtype, home: torch.Tensor) -> PackedWeight:
        start = slot.home_offset * dtype.itemsize
        planes = spec.planes(home[start : start + spec.size_bytes])
        return PackedWeight(spec, planes, dtype, self)

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for the values of one weight at a time, which every product of many rows uses again."""
        n_bytes = torch.Size(shape).numel() * dtype.itemsize
        if self._scratch.nbytes < n_bytes:
            self._scratch = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        return self._scratch[:n_bytes].view(dtype).view(shape)


class PackedWeight(torch.Tensor):
    """A parameter of which only the bytes exist, packed or (in RAM) 16-bit."""

    spec: PackedSpec
    planes: list[torch.Tensor]
    products: InPlaceProducts
    call: Any
    """Arguments of the CPU's kernel for this weight; None: there is no kernel for it."""
    is_on_device: bool
    """Whether its bytes are on a GPU that has a kernel for them."""
    followers: list[PackedWeight] | None
    """Weights that a GPU's layer multiplies the same activations with right behind this one; None: not seen yet."""

    @staticmethod
    def __new__(
        cls, spec: PackedSpec, planes: list[torch.Tensor], dtype: torch.dtype, products: InPlaceProducts
    ) -> PackedWeight:
        made = torch.Tensor._make_wrapper_subclass(cls, spec.value_shape, dtype=dtype, device=products.device)
        made.spec, made.planes, made.products, made.followers = spec, planes, products, None
        where, knows = planes[0].device.type, spec.format.name in products.most_rows
        made.is_on_device = where == "cuda" and DeviceProducts.can(spec)
        has_kernel = where == "cpu" and knows and PackedProducts.can(spec)
        made.call = call_of(spec, planes) if has_kernel else None
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def expanded(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The values, in memory of their own or in `out`; 16-bit ones where they are, if that is the device."""
        device = self.products.device
        if self.spec.format.is_plain:
            return self.planes[0].view(self.spec.shape).to(device)
        if out is None:
            out = torch.empty(self.spec.value_shape, dtype=self.dtype, device=device)
        self.spec.expand_planes([plane.to(device) for plane in self.planes], out)
        return out

    def one(self, index: int) -> PackedWeight:
        """One matrix of a stack."""
        spec = PackedSpec(self.spec.format, self.spec.shape[1:], self.spec.is_transposed)
        return self._run(spec, range(self.spec.shape[0])[index] * spec.num_blocks)

    def some(self, first: int, last: int) -> PackedWeight:
        """Rows [first, last) of a matrix as packed."""
        spec = PackedSpec(self.spec.format, (last - first, self.spec.shape[1]))
        return self._run(spec, first * self.spec.format.num_blocks(self.spec.shape[1:]))

    def _run(self, spec: PackedSpec, start: int) -> PackedWeight:
        planes = [plane[start : start + spec.num_blocks] for plane in self.planes]
        return PackedWeight(spec, planes, self.dtype, self.products)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The values [..., columns] of the rows of a matrix with these numbers [...], which are on its device."""
        flat, columns = ids.reshape(-1), self.spec.shape[1]
        shape = (self.spec.shape[0], self.spec.format.num_blocks((columns,)), -1)
        planes = [plane.view(shape)[flat].flatten(0, 1) for plane in self.planes]
        out = torch.empty(len(flat), columns, dtype=self.dtype, device=ids.device)
        PackedSpec(self.spec.format, (len(flat), columns)).expand_planes(planes, out)
        return out.view(*ids.shape, columns)

    def chosen(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """x [P / K, columns] times the packed rows of the matrices `numbers` [P] of this stack, as
        `InPlaceProducts.takes_pairs` says: [P, rows]."""
        return self.products.chosen(self.stack, x, numbers)

    @cached_property
    def stack(self) -> Any:
        """The stack for the CPU's kernels."""
        count = self.spec.shape[0]
        planes = [plane.unflatten(0, (count, -1)) for plane in self.planes]
        return stack_of(self.spec, [plane[0] for plane in planes], [plane[0].nbytes for plane in planes])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS or getattr(getattr(func, "__self__", None), "__name__", "") in _PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        found = NotImplemented if handler is None else handler(*args, **kwargs)
        if found is not NotImplemented:
            return found
        given: Any = tree_map(lambda value: value.expanded() if isinstance(value, cls) else value, (args, kwargs))
        return func(*given[0], **given[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} reached a packed weight, which has no values")


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, PackedWeight) or weight.spec.is_transposed or len(weight.shape) != 2:
        return NotImplemented
    return weight.products.product(weight, x, bias)


def _matmul(x: Any, weight: Any) -> Any:
    if not isinstance(weight, PackedWeight) or not weight.spec.is_transposed or len(weight.shape) != 2:
        return NotImplemented
    return weight.products.product(weight, x, None)


def _item(weight: PackedWeight, index: Any) -> Any:
    is_number = isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.ndim)
    return weight.one(int(index)) if is_number and len(weight.shape) == 3 else NotImplemented


def _embedding(ids: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, **others: Any) -> Any:
    if not isinstance(weight, PackedWeight) or len(weight.shape) != 2 or max_norm is not None:
        return NotImplemented
    return weight.rows(ids)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__getitem__: _item,
}
_ASKS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
}
_PROPERTIES = {"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "itemsize", "nbytes"}
