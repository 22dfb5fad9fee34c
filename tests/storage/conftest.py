"""Files, engines and drives for the tests of storage."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from outcore.common.quantities import KIB, MIB
from outcore.storage import BlockFile, PosixEngine
from outcore.storage import posix_file as posix_module
from outcore.storage.filesystem import DirectLimits
from tests.storage.block_file_cases import KINDS


@pytest.fixture
def file(tmp_path: Path) -> Iterator[BlockFile]:
    with BlockFile(tmp_path / "data.bin", "create", 4 * MIB) as opened:
        yield opened


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "direct-4096":
        monkeypatch.setattr(posix_module, "direct_limits", lambda fd: DirectLimits(True, 4096, 4096, "test"))
    return request.param


@pytest.fixture(scope="module")
def engine() -> Iterator[PosixEngine]:
    with PosixEngine(4, 256 * KIB) as shared:
        yield shared


@pytest.fixture(params=[1, 3])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """Folders of one drive or three."""
    return [tmp_path / f"drive{number}" for number in range(request.param)]
