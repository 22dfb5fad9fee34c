"""Bytes between host or device memory and drives: aligned files, engines, and a store of named tensors."""

from outcore.storage.block_file import BlockFile
from outcore.storage.block_spans import aligned_bytes
from outcore.storage.descriptor import BufferedFallbackWarning, system_file
from outcore.storage.engine import DRIVE_ACCESS, DriveAccess, StorageEngine, open_engine
from outcore.storage.engines import KvikioEngine, PosixEngine
from outcore.storage.errors import ChangedBytes, StorageError, StoreInUse, Transfer, gather
from outcore.storage.filesystem import drop_cached
from outcore.storage.store import DigestRule, TensorSpec, TensorStore
