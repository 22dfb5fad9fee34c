"""What other libraries say at a start although it concerns nobody."""

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest

import outcore.model.adapters  # noqa: F401

LINE = "Failed to load CPU gemm_4bit_forward from kernels-community"


def test_only_the_missing_kernel_is_not_told(caplog):
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning(LINE + ": %s. Please make sure", ImportError("No module named 'kernels'"))
    logger.warning("Failed to load something else: %s", "it is broken")
    assert caplog.messages == ["Failed to load something else: it is broken"]


def test_the_line_is_still_theirs():
    pytest.importorskip("bitsandbytes")
    found = find_spec("bitsandbytes.backends.cpu.ops")
    if found is None or found.origin is None:
        pytest.skip("bitsandbytes is not installed")
    text = Path(found.origin).read_text(encoding="utf-8")
    assert LINE in text and "logging.getLogger(__name__)" in text
