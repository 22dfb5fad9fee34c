"""Products of weights with a few rows of activations on the CPU, where the weights are.

The C++ kernels (in the optimizer's extension) read the packed bytes once for up to 16 rows. Activations are rounded to
16 bits with a scale for 256 columns, and NF4's code values to 14, so results are within 4e-4 of a standard deviation.
Weights of 16 bits (`plain`) are multiplied with the activations as they are, and summed in fp32. Packed formats without
a kernel, and machines without a compiler, expand the weight instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from outcore.formats.packed import PackedSpec
from outcore.formats.plain import Int4
from outcore.optim import build_extension

STEP = 64
"""Columns that a kernel takes together."""
BOX_BYTES, ANSWERED_AT, BUSY_AT, FAILED_AT, TASK_BITS = 192, 64, 128, 136, 20
"""products.h: Box."""
VARIANT_NAMES = ("baseline", "avx2", "avxvnni", "avx512vnni")
_CODES = {"nf4": 0, "int8": 1, "mxfp4": 3, "q4_0": 4, "q8_0": 5, "q4_k": 6, "q5_k": 7, "q4_1": 8, "q6_k": 9}
_CODES |= {"bf16": 10, "fp16": 11}
"""products.h: Packed."""
_INT4_CODE = 2
_SCALE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""products.h: ScaleType."""


class CProduct(ctypes.Structure):
    """products.h: Product."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("x_sum", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
        ("block_shift", ctypes.c_int32),
        ("m", ctypes.c_int32),
        ("places", ctypes.c_void_p),
    )


class CStack(ctypes.Structure):
    """products.h: Stack."""

    _fields_ = (
        ("first", CProduct),
        ("codes_stride", ctypes.c_int64),
        ("scale_stride", ctypes.c_int64),
        ("zero_stride", ctypes.c_int64),
        ("numbers", ctypes.c_void_p),
        ("elsewhere", ctypes.c_void_p),
        ("every", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("share", ctypes.c_int32),
        ("places", ctypes.c_void_p),
        ("fetch", ctypes.c_void_p),
    )


class Scattered:
    """Weights of a stack that lie anywhere on the CPU, or are fetched there when they are needed. `places` (int64
    [weights], on the CPU): bytes from where the first one's planes are said to lie to each weight, `ABSENT` for those
    to fetch; `fetch`: called on another thread with the numbers of all weights that a question needs, where one of them
    is absent; sets their places and returns 0, or an errno. It may not raise. There as long as the stack is."""

    ABSENT: ClassVar[int] = -(1 << 63)
    """products.h: kAbsent."""

    def __init__(self, places: torch.Tensor, fetch: Callable[[list[int]], int]) -> None:
        self.places = places
        self.fetch = _Fetch(lambda numbers, count: fetch(numbers[:count]))


_Fetch: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32)


class PackedProducts:
    """Threads that multiply packed weights and those of 16 bits, one product at a time. `variant`: of
    `available_variants`, or the best.
    A GPU may ask for products itself (`listen`).

    ExtensionUnavailable without a compiler; ValueError for a variant that the processor lacks.
    """

    MOST_PAIRS: ClassVar[int] = 1024
    """products.cpp: kMostPairs."""

    def __init__(self, num_threads: int, variant: str = "auto") -> None:
        self._team, self._lock = None, threading.Lock()
        self._box: torch.Tensor | None = None
        self._library = _library()
        names = available_variants()
        self.variant = names[-1] if variant == "auto" else variant
        if self.variant not in names:
            raise ValueError(f"this processor has no {variant}; it can run {', '.join(names)}: take 'auto'")
        code = ctypes.c_int()
        self._team = self._library.outcore_product_team_new(
            VARIANT_NAMES.index(self.variant), num_threads, ctypes.byref(code)
        )
        if not self._team:
            raise RuntimeError(f"{num_threads} threads for products could not be started: {os.strerror(code.value)}")

    @staticmethod
    def can(spec: PackedSpec) -> bool:
        """Whether there is a kernel for weights like this one."""
        power_of_two = spec.format.block & (spec.format.block - 1) == 0
        known = spec.format.name in _CODES or (
            isinstance(spec.format, Int4) and power_of_two and spec.format.block >= 32
        )
        step = spec.format.block if spec.format.is_plain else max(STEP, spec.format.block)
        return known and len(spec.shape) == 2 and spec.shape[1] % step == 0

    def product(self, spec: PackedSpec, data: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x [m, columns] times the weight [rows, columns]: [m, rows] in fp32."""
        return self.multiply(call_of(spec, spec.planes(data)), x)

    def multiply(self, call: CProduct, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [m, columns] times the weight of `call_of`, whose planes must still be there: [m, rows] in fp32, in `out`
        where that is given."""
        assert x.shape[1] == call.columns
        x = x.float().contiguous()
        if out is None:
            out = torch.empty(len(x), call.rows, dtype=torch.float32)
        with self._lock:
            call.m, call.out = len(x), out.data_ptr()
            code = self._library.outcore_product_run(self._team, ctypes.byref(call), x.data_ptr())
            if code:
                raise MemoryError(os.strerror(code))
        return out

    def multiply_chosen(
        self, stack: CStack, x: torch.Tensor, numbers: torch.Tensor, share: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Row n / share of x [rows, columns] times weight number n of `numbers` (int32) of the stack: [pairs, rows of a
        weight] in fp32, in `out` where that is given. Where the number is negative nothing is written. `MOST_PAIRS` at
        most. OSError where one could not be fetched."""
        pairs = len(numbers)
        assert pairs <= self.MOST_PAIRS and len(x) * share >= pairs and x.shape[1] == stack.first.columns
        x, numbers = x.float().contiguous(), numbers.to(torch.int32).contiguous()
        if out is None:
            out = torch.zeros(pairs, stack.first.rows, dtype=torch.float32)
        with self._lock:
            stack.numbers, stack.share, stack.elsewhere, stack.every = numbers.data_ptr(), share, None, None
            run = self._library.outcore_product_run_stack
            code = run(self._team, ctypes.byref(stack), pairs, x.data_ptr(), out.data_ptr())
            if code == errno.ENOMEM:
                raise MemoryError(os.strerror(code))
            if code:
                raise OSError(code, os.strerror(code))
        return out

    def listen(self, box: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """Answer from now on to what is written to the box (products.h: Box), a uint8 tensor like the others: room for
        rows of activations, and for the results of one task behind each other, in fp32."""
        assert self._box is None and len(box) >= BOX_BYTES and not box.data_ptr() % 64
        code = self._library.outcore_product_listen(self._team, *(given.data_ptr() for given in (box, x, out)))
        if code:
            raise RuntimeError(f"a thread for the GPU's products could not be started: {os.strerror(code)}")
        self._box = box  # as long as its thread looks into it

    def task(self, calls: Sequence[CProduct]) -> int:
        """Number by which the box may ask for these products, all of the same rows of activations."""
        return _task(self._library.outcore_product_task(self._team, (CProduct * len(calls))(*calls), len(calls)))

    def task_of_chosen(
        self, stack: CStack, numbers: torch.Tensor, share: int, elsewhere: torch.Tensor, every: torch.Tensor
    ) -> int:
        """Number by which the box may ask for products of rows with those weights of a stack that `numbers` says when
        it asks, as `multiply_chosen`; of as many pairs as it asks for, all numbers at most. `elsewhere`: for each
        weight -1, or who else multiplies it; `every` [1]: of the pairs left every so many are somebody else's, too (0:
        none). All int32, on the CPU, and there as long as this is."""
        stack.numbers, stack.share = numbers.data_ptr(), share
        stack.elsewhere, stack.every = elsewhere.data_ptr(), every.data_ptr()
        return _task(self._library.outcore_product_stack(self._team, ctypes.byref(stack), len(numbers)))

    @staticmethod
    def question(task: int, rows: int) -> int:
        """Lower half of what is written to the box; the upper half counts."""
        return rows << TASK_BITS | task

    def answered(self) -> tuple[int, float]:
        """(questions of the box that were answered, seconds that it took)."""
        if self._box is None:
            return 0, 0.0
        number, seconds = self._box[ANSWERED_AT:].view(torch.int64)[0], self._box[BUSY_AT:].view(torch.float64)[0]
        return int(number) >> 32, float(seconds)

    def take_failure(self) -> str:
        """Why results that the box asked for since the last call are not there; empty: they are. While nothing is
        asked."""
        if self._box is None:
            return ""
        failed = self._box[FAILED_AT:].view(torch.int32)[:1]
        code = int(failed)
        failed.zero_()
        return os.strerror(code) if code else ""

    def close(self) -> None:
        """End the threads; safe to call twice. No GPU may wait for them any more."""
        if self._team:
            self._library.outcore_product_team_delete(self._team)
            self._team = None

    def __enter__(self) -> PackedProducts:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def call_of(spec: PackedSpec, planes: Sequence[torch.Tensor]) -> CProduct:
    """The part of a product that is the same for all activations: a weight [rows, columns] for which there is a
    kernel (`PackedProducts.can`), by its planes on the CPU."""
    assert PackedProducts.can(spec)
    is_int4, (codes, scale, zero) = isinstance(spec.format, Int4), [*planes, None, None][:3]
    return CProduct(
        codes=_address(codes),
        scale=_address(scale),
        zero=_address(zero),
        rows=spec.shape[0],
        columns=spec.shape[1],
        format=_INT4_CODE if is_int4 else _CODES[spec.format.name],
        scale_type=_SCALE_CODES[spec.format.planes[1].dtype] if is_int4 else 0,
        block_shift=spec.format.block.bit_length() - 1,
    )


def stack_of(
    spec: PackedSpec,
    planes: Sequence[torch.Tensor],
    stride_bytes: Sequence[int],
    scattered: Scattered | None = None,
) -> CStack:
    """A stack of weights, spec [weights, rows, columns], for whose rows there is a kernel: by the planes of the first
    one on the CPU and what lies in each plane between a weight and the next; `scattered` instead: they lie anywhere."""
    assert not spec.format.is_plain, "kernels take rows that chose one weight together, rounded"
    one = PackedSpec(spec.format, spec.shape[1:], spec.is_transposed)
    strides = [*stride_bytes, 0, 0, 0]
    made = CStack(call_of(one, planes), strides[0], strides[1], strides[2], count=spec.shape[0])
    if scattered is not None:
        made.places, made.fetch = scattered.places.data_ptr(), ctypes.cast(scattered.fetch, ctypes.c_void_p).value
    return made


def available_variants() -> tuple[str, ...]:
    """Names of the instruction sets that this processor has kernels for, the fastest last."""
    found = int(_library().outcore_product_variants())
    return tuple(name for bit, name in enumerate(VARIANT_NAMES) if found >> bit & 1)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_extension()))
    p, i32 = ctypes.c_void_p, ctypes.c_int32
    for name, returns, arguments in (
        ("variants", i32, ()),
        ("team_new", p, (i32, i32, p)),
        ("run", ctypes.c_int, (p, p, p)),
        ("listen", ctypes.c_int, (p, p, p, p)),
        ("task", ctypes.c_int64, (p, p, i32)),
        ("run_stack", ctypes.c_int, (p, p, i32, p, p)),
        ("stack", ctypes.c_int64, (p, p, i32)),
        ("team_delete", None, (p,)),
    ):
        function = getattr(library, f"outcore_product_{name}")
        function.restype, function.argtypes = returns, arguments
    return library


def _task(found: int) -> int:
    if not 0 <= found < 1 << TASK_BITS:
        raise MemoryError(os.strerror(-found) if found < 0 else "more tasks than a box can name")
    return found


def _address(plane: torch.Tensor | None) -> int | None:
    return None if plane is None else plane.data_ptr()
