"""A CUDA runtime made of Python."""

import ctypes
from typing import Any

import torch

CUDA0 = torch.device("cuda", 0)


class FakeRuntime:
    """Pins up to `limit_bytes`, in single pieces of up to `piece_bytes`; speaks the child's dialect."""

    def __init__(self, limit_bytes: int, piece_bytes: int = 1 << 60, write_combined: bool = True) -> None:
        self.limit_bytes = limit_bytes
        self.piece_bytes = piece_bytes
        self.write_combined = write_combined
        self.pinned: dict[int, int] = {}
        self.memory: dict[int, Any] = {}
        self.log: list[str] = []

    def register(self, address: int, n_bytes: int) -> str:
        assert address % 4096 == 0
        if n_bytes > self.piece_bytes or sum(self.pinned.values()) + n_bytes > self.limit_bytes:
            return "out of memory (CUDA error 2)"
        self.pinned[address] = n_bytes
        self.log.append("register")
        return ""

    def unregister(self, address: int) -> str:
        del self.pinned[address]
        self.log.append("unregister")
        return ""

    def alloc_write_combined(self, n_bytes: int) -> tuple[int, str]:
        if not self.write_combined:
            return 0, "not supported (CUDA error 801)"
        buffer = ctypes.create_string_buffer(n_bytes)
        text = self.register(-(-ctypes.addressof(buffer) // 4096) * 4096, n_bytes)
        self.memory[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer), text

    def free_write_combined(self, address: int) -> str:
        del self.memory[address]
        return self.unregister(-(-address // 4096) * 4096)

    def synchronize(self) -> None:
        self.log.append("synchronize")
