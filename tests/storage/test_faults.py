"""Real refusals of the operating system: full filesystems, size limits, kills, power-cut ordering, 4 KiB sectors."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from outcore.common.quantities import KIB, MIB
from outcore.storage import BlockFile, PosixEngine, StorageError, TensorSpec, TensorStore, aligned_bytes
from tests.forked import run_script

WAIT_S = 60.0
SMALL_BYTES = 24 * MIB


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"no small filesystem here: `{' '.join(command)}` says {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.fixture(params=["ext4-512", "ext4-4096", "tmpfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of 24 MiB; on a loop device with 512 or 4096 byte sectors, or in memory."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs root on Linux")
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    loop = None
    if request.param == "tmpfs":
        _run("mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "none", str(mount_point))
    else:
        if not shutil.which("mkfs.ext4") or not shutil.which("losetup"):
            pytest.skip("mkfs.ext4 and losetup are needed")
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(SMALL_BYTES)
        loop = _run("losetup", "--find", "--show", "--sector-size", request.param.split("-")[1], str(image))
        try:
            _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", loop)
            _run("mount", loop, str(mount_point))
        except BaseException:
            subprocess.run(["losetup", "-d", loop], check=False)
            raise
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", str(mount_point)], check=True)
        if loop is not None:
            subprocess.run(["losetup", "-d", loop], check=True)


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


@pytest.mark.filterwarnings("ignore::outcore.storage.BufferedFallbackWarning")
def test_a_full_filesystem_is_found_at_preallocation_and_gives_the_space_back(small: Path):
    before_bytes = free_bytes(small)
    with BlockFile(small / "data.bin", "create", 100) as file:
        file.write_from(b"kept", 3)
        with pytest.raises(StorageError, match=r"ENOSPC.*full") as caught:
            file.preallocate(64 * MIB)
        assert (caught.value.wanted, caught.value.got) == (64 * MIB - 100, 0)
        assert "needed" in str(caught.value)
        assert file.size_bytes == 100
        text = bytearray(4)
        file.read_into(text, 3)
        assert text == b"kept"
        assert free_bytes(small) >= before_bytes - 64 * KIB


@pytest.mark.filterwarnings("ignore::outcore.storage.BufferedFallbackWarning")
def test_a_filesystem_that_fills_up_under_writes(small: Path):
    data = aligned_bytes(MIB)
    data[:] = 3
    with BlockFile(small / "data.bin", "create") as file, PosixEngine(4) as engine:
        transfers = [engine.submit_write(file, number * MIB, data) for number in range(40)]
        outcomes = []
        for transfer in transfers:
            try:
                outcomes.append(transfer.wait(WAIT_S))
            except StorageError as error:
                assert error.errno == errno.ENOSPC
                outcomes.append(0)
        assert 10 < sum(1 for moved in outcomes if moved) < 40
        for number, moved in enumerate(outcomes):  # what was reported written is there
            if moved:
                back = aligned_bytes(MIB)
                engine.submit_read(file, number * MIB, back).wait(WAIT_S)
                assert (back == 3).all()


@pytest.mark.filterwarnings("ignore::outcore.storage.BufferedFallbackWarning")
def test_a_store_that_does_not_fit_is_refused_and_one_that_fits_works_to_its_last_byte(small: Path):
    with pytest.raises(StorageError, match=r"needs .* and .* are free") as caught:
        TensorStore.create([small / "store"], [TensorSpec("x", torch.uint8, (SMALL_BYTES + 1,))])
    assert caught.value.errno == errno.ENOSPC
    n_bytes = (free_bytes(small) - MIB) // 4096 * 4096
    tensor = torch.randint(0, 256, (n_bytes - 77,), dtype=torch.uint8)
    with TensorStore.create([small / "store"], [TensorSpec("x", torch.uint8, (n_bytes - 77,))]) as store:
        if "tmpfs" not in str(small):
            (small / "filler").write_bytes(b"x" * (free_bytes(small) - 64 * KIB))  # somebody takes the rest
        store.submit_write("x", tensor).wait(WAIT_S)
        back = torch.empty_like(tensor)
        store.submit_read("x", back).wait(WAIT_S)
        assert torch.equal(back, tensor)


@pytest.mark.filterwarnings("ignore::outcore.storage.BufferedFallbackWarning")
def test_unaligned_transfers_on_real_sectors(small: Path, request: pytest.FixtureRequest):
    sector_bytes = {"ext4-512": 512, "ext4-4096": 4096}.get(request.node.callspec.params["small"])
    rng = np.random.default_rng(5)
    model = np.zeros(300_007, dtype=np.uint8)
    with BlockFile(small / "data.bin", "create", model.nbytes) as file:
        if sector_bytes is not None:
            assert file.direct
            assert file.block_bytes == sector_bytes
        for _ in range(100):
            start, stop = sorted(rng.integers(0, model.nbytes, 2))
            model[start:stop] = rng.integers(0, 256, stop - start)
            file.write_from(model[start:stop].copy(), int(start))
        back = np.empty_like(model)
        file.read_into(back, 0)
        assert (back == model).all()
    assert (small / "data.bin").read_bytes() == model.tobytes()


def run_child(folder: Path, code: str) -> tuple[int, str]:
    script, log = folder / "child.py", folder / "log.txt"
    script.write_text(textwrap.dedent(code))
    return run_script(script, [], os.environ, log), log.read_text()


@pytest.mark.more
def test_the_file_size_limit_of_a_process(tmp_path: Path):
    code, errors = run_child(
        tmp_path,
        f"""
        import resource, errno
        from outcore.storage import BlockFile, StorageError, aligned_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        calls = {{
            "create": lambda: BlockFile({str(tmp_path / "a.bin")!r}, "create", 2 << 20),
            "grow": lambda: BlockFile({str(tmp_path / "b.bin")!r}, "create").write_from(aligned_bytes(4096), 1 << 20),
            "tail": lambda: BlockFile({str(tmp_path / "c.bin")!r}, "create", direct=False).write_from(b"123", 1 << 20),
        }}
        for name, call in calls.items():
            try:
                call()
            except StorageError as error:
                assert error.errno == errno.EFBIG and "ulimit -f" in str(error), (name, error)
            else:
                raise SystemExit(f"{{name}}: no error")
        """,
    )
    assert code == 0, errors
