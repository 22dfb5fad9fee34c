"""A permutation of n items computed from (seed, epoch), item by item: no list of n numbers and no generator state.

A Feistel network over the next even power of two, stepping on until the value is below n (cycle walking, on average
under four steps), its rounds keyed by splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
2014). The same on every platform and library version, so a resumed run sees the same order."""

from __future__ import annotations

import numpy as np

ROUNDS = 8
_U64 = np.uint64


def splitmix64(values: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser, element by element on uint64."""
    with np.errstate(over="ignore"):
        values = values + _U64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
        return values ^ (values >> _U64(31))


class Permutation:
    """`permutation(indices)` maps each of 0..n-1 to a different one of 0..n-1."""

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        if n < 1:
            raise ValueError(f"a permutation needs at least one item, got {n}")
        self.n = n
        half_bits = max(1, -(-max(1, (n - 1).bit_length()) // 2))
        self._half_bits = _U64(half_bits)
        self._half_mask = _U64((1 << half_bits) - 1)
        start = splitmix64(np.asarray([seed & (2**64 - 1)], dtype=_U64)) ^ np.asarray([epoch], dtype=_U64)
        keys = []
        for _ in range(ROUNDS):
            start = splitmix64(start)
            keys.append(start[0])
        self._keys = keys

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """int64 [k] -> int64 [k]; IndexError for an index outside 0..n-1."""
        values = np.asarray(indices, dtype=np.int64)
        if values.size and (int(values.min()) < 0 or int(values.max()) >= self.n):
            raise IndexError(f"index outside 0..{self.n - 1}")
        current = self._once(values.astype(_U64))
        while (outside := current >= _U64(self.n)).any():
            current[outside] = self._once(current[outside])
        return current.astype(np.int64)

    def _once(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (splitmix64(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right
