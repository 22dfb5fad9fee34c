"""Random numbers as a pure function of (seed, position): nothing is kept, so nothing depends on the order of requests.

Two rounds of SplitMix64's finalizer mix the key; 53 bits become a float in [0, 1). The same on every machine."""

from __future__ import annotations

import hashlib

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for one token of one answer."""
    mixed = _mixed(_mixed((seed + _GOLDEN) & _MASK) ^ ((position * _GOLDEN) & _MASK))
    return (mixed >> 11) * 2.0**-53


def derived_seed(seed: int, choice: int) -> int:
    """Seed of answer number `choice` to the same request; the first keeps the request's own."""
    return seed if choice == 0 else _mixed(seed ^ _mixed(choice)) >> 1


def seed_of(name: str) -> int:
    """Seed by a request's name, where it gave none."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def _mixed(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
