"""Engines that move bytes of files: threads over POSIX calls, or kvikio."""

from outcore.storage.engines.kvikio import KvikioEngine
from outcore.storage.engines.worker import IoRequest, PosixEngine, WorkerEngine
