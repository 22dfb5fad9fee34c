"""A store of named tensors over the files of several drives."""

from outcore.storage.store.checksums import CHUNK_BYTES
from outcore.storage.store.files import DirectoryLock, lock_directories
from outcore.storage.store.tensor_spec import Extent, TensorSpec
from outcore.storage.store.tensor_store import TensorStore
