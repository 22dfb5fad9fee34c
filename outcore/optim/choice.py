"""Choice of the optimizer's implementation: the extension, built when it is not, or torch, saying why."""

from __future__ import annotations

import logging

from outcore.optim.backend import Backend, BackendName
from outcore.optim.build import ExtensionUnavailable
from outcore.optim.extension import ExtensionBackend
from outcore.optim.reference import TorchBackend

logger = logging.getLogger(__name__)


def open_backend(name: BackendName = "auto") -> Backend:
    """The named implementation. ExtensionUnavailable when "extension" cannot be had; "auto" then logs it."""
    if name not in ("auto", "extension", "torch"):
        raise ValueError(f"the optimizer's backend is 'auto', 'extension' or 'torch', not {name!r}")
    if name == "torch":
        return TorchBackend()
    try:
        return ExtensionBackend()
    except (ExtensionUnavailable, TimeoutError) as error:
        if name == "extension":
            raise
        logger.warning("the CPU optimizer runs in torch, several times slower: %s", error)
        return TorchBackend()
