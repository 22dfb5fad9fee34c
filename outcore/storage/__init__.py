"""Bytes between host or device memory and drives: aligned files, engines, and a store of named tensors."""

from outcore.storage.block_file import BlockFile
from outcore.storage.descriptor import BufferedFallbackWarning
from outcore.storage.engine import StorageEngine, open_engine
from outcore.storage.engines.kvikio import KvikioEngine
from outcore.storage.engines.posix import PosixEngine
from outcore.storage.errors import StorageError, describe_errno
from outcore.storage.host_buffer import aligned_bytes
from outcore.storage.store.tensor_spec import Extent, TensorSpec
from outcore.storage.store.tensor_store import TensorStore
from outcore.storage.transfer import Transfer, gather

__all__ = [
    "BlockFile",
    "BufferedFallbackWarning",
    "Extent",
    "KvikioEngine",
    "PosixEngine",
    "StorageEngine",
    "StorageError",
    "TensorSpec",
    "TensorStore",
    "Transfer",
    "aligned_bytes",
    "describe_errno",
    "gather",
    "open_engine",
]
