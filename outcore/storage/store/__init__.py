"""A store of named tensors over the files of several drives."""

from outcore.storage.store.digests import DigestRule
from outcore.storage.store.files import (
    LOCK_NAME,
    STORE_NAMES,
    DirectoryLock,
    Extent,
    TensorSpec,
    lock_directories,
    remove_files,
)
from outcore.storage.store.tensor_store import TensorStore
