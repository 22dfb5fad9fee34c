"""Bytes between host or device memory and drives: aligned files, engines, and a store of named tensors."""

from outcore.storage.block_file import BlockFile
from outcore.storage.descriptor import BufferedFallbackWarning
from outcore.storage.engine import StorageEngine, open_engine
from outcore.storage.errors import StorageError, describe_errno
from outcore.storage.host_buffer import aligned_bytes
from outcore.storage.posix_engine import PosixEngine
from outcore.storage.transfer import Transfer, gather

__all__ = [
    "BlockFile",
    "BufferedFallbackWarning",
    "PosixEngine",
    "StorageEngine",
    "StorageError",
    "Transfer",
    "aligned_bytes",
    "describe_errno",
    "gather",
    "open_engine",
]
