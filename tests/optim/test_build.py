"""Building the extension: once, atomically, one builder at a time, with errors that say what to install."""

import fcntl
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outcore.optim import BuildFailed, CompilerMissing, ExtensionUnavailable, build_extension, open_backend
from outcore.optim import __main__ as command
from outcore.optim import build as build_module
from outcore.optim import extension as extension_module
from outcore.optim.build import LIBRARY_NAME, cache_dir, find_compiler, product_variants, variants
from outcore.optim.extension import ExtensionBackend, load_library
from tests.optim.cases import extension
from tests.refused import failing, refused

FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake {version}"; exit 0; fi
echo "$@" >> {log}
{body}
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo built > "$2"; fi; shift; done
"""


def fake_compiler(folder: Path, body: str = "", version: str = "1.0", name: str = "fake++") -> str:
    path = folder / name
    path.write_text(FAKE_COMPILER.format(log=folder / "calls", body=body, version=version))
    path.chmod(0o755)
    return str(path)


def calls(folder: Path) -> list[str]:
    log = folder / "calls"
    return log.read_text().splitlines() if log.exists() else []


def test_built_once_per_source_flags_and_compiler(tmp_path, monkeypatch):
    compiler = fake_compiler(tmp_path)
    library = build_extension(tmp_path / "env", compiler)
    assert library.read_text() == "built\n"
    assert library.parent.parent == tmp_path / "env" / "torch_extensions" / "outcore_optim"
    num_commands = len(variants()) + len(product_variants()) + 5
    assert len(calls(tmp_path)) == num_commands
    assert all("-ffp-contract=off" in call and "-march" not in call for call in calls(tmp_path)[:-1])
    assert build_extension(tmp_path / "env", compiler) == library
    assert len(calls(tmp_path)) == num_commands
    other = build_extension(tmp_path / "env", fake_compiler(tmp_path, version="2.0", name="newer++"))
    assert other != library
    monkeypatch.setattr(build_module, "FLAGS", (*build_module.FLAGS, "-g"))
    assert build_extension(tmp_path / "env", compiler) not in (library, other)
    left = [path.name for path in library.parent.parent.iterdir() if path.name.startswith(".")]
    assert not left  # nothing half-built
    assert [path.name for path in library.parent.iterdir()] == [LIBRARY_NAME]


def test_the_wheels_library_is_taken_and_where_it_does_not_load_that_is_said(tmp_path, monkeypatch, caplog):
    made = build_extension()
    monkeypatch.setattr(build_module, "SHIPPED", made)
    assert build_extension(tmp_path) == made and not list(tmp_path.iterdir())
    damaged = tmp_path / LIBRARY_NAME
    damaged.write_text("for another system")
    monkeypatch.setattr(build_module, "SHIPPED", damaged)
    with caplog.at_level(logging.WARNING):
        assert build_extension() == made
    assert "do not load here" in caplog.text


def test_several_builders_at_once_build_once(tmp_path):
    compiler = fake_compiler(tmp_path, "sleep 0.02")
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(build_extension(tmp_path / "env", compiler))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert len(calls(tmp_path)) == len(variants()) + len(product_variants()) + 5


def test_waiting_for_another_builder_is_bounded(tmp_path):
    compiler = fake_compiler(tmp_path)
    library = build_extension(tmp_path / "env", compiler)
    library.unlink()
    lock = library.parent.parent / f"{library.parent.name}.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="another process has been building"):
            build_extension(tmp_path / "env", compiler, lock_timeout_s=0.05)


def test_a_damaged_cache_is_built_again(tmp_path):
    compiler = fake_compiler(tmp_path)
    library = build_extension(tmp_path / "env", compiler)
    library.unlink()  # the folder is left
    assert build_extension(tmp_path / "env", compiler) == library
    assert library.exists()


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "COMPILERS", ("no-such++",))
    with pytest.raises(CompilerMissing, match=r"no-such\+\+.*sudo apt install g\+\+.*-m outcore\.optim"):
        build_extension(tmp_path)
    assert find_compiler() is None
    built = build_extension(tmp_path, fake_compiler(tmp_path))
    assert build_extension(tmp_path) == built  # an earlier build of the same source is good


def test_auto_falls_back_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(extension_module, "build_extension", failing(CompilerMissing("no C++ compiler here")))
    with caplog.at_level(logging.WARNING):
        assert open_backend("auto").name == "torch"
    assert "no C++ compiler here" in caplog.text
    with pytest.raises(CompilerMissing):
        open_backend("extension")


def test_a_compiler_that_refuses(tmp_path):
    compiler = fake_compiler(tmp_path, 'echo "abi.h:1: error: what is this" >&2; exit 1')
    with pytest.raises(BuildFailed, match=r"(?s)abi\.h:1: error: what is this.*command: .*install g\+\+"):
        build_extension(tmp_path / "env", compiler)
    assert not list(cache_dir(tmp_path / "env").glob(f"*/{LIBRARY_NAME}"))
    silent = fake_compiler(tmp_path, "exit 3", name="silent++")
    refused(BuildFailed, "exit code 3", lambda: build_extension(tmp_path / "env", silent))


def test_a_compiler_that_hangs_or_cannot_run(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "COMMAND_TIMEOUT_S", 0.05)
    with pytest.raises(BuildFailed, match="did not end within"):
        build_extension(tmp_path / "env", fake_compiler(tmp_path, "sleep 5"))
    broken = tmp_path / "broken++"
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o755)
    refused(BuildFailed, "cannot run", lambda: build_extension(tmp_path / "env", str(broken)))


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "torch_extensions").write_text("a file")
    refused(BuildFailed, "cannot make the folder", lambda: build_extension(tmp_path, fake_compiler(tmp_path)))


def test_a_library_that_does_not_load(tmp_path, monkeypatch):
    path = tmp_path / "x" / LIBRARY_NAME
    path.parent.mkdir()
    path.write_text("not a library")
    refused(ExtensionUnavailable, "does not load", lambda: load_library(path))
    good = build_extension() if extension() else path
    monkeypatch.setattr(extension_module, "ABI", 999)
    refused(ExtensionUnavailable, "this version needs 999", lambda: load_library(good))


def test_variants_of_this_processor():
    best = extension()
    assert best.available_variants[0] == "baseline"
    assert best.variant == best.available_variants[-1]
    with pytest.raises(ValueError, match="this processor has no avx10"):
        ExtensionBackend("avx10")  # pyright: ignore[reportArgumentType]


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "build_extension", lambda: tmp_path / LIBRARY_NAME)
    assert command.main() == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / LIBRARY_NAME)
    monkeypatch.setattr(command, "build_extension", failing(CompilerMissing("install one")))
    assert command.main() == 1
    assert "install one" in capsys.readouterr().err


def test_the_library_needs_an_old_c_plus_plus_runtime_only():
    """A conda Python may come with an older libstdc++ than the compiler's: only symbols of GCC 5 or before."""
    extension()
    objdump = build_module.shutil.which("objdump")
    if objdump is None:
        pytest.skip("needs objdump")
    symbols = subprocess.run([objdump, "-T", str(build_extension())], capture_output=True, text=True, check=True).stdout
    needed = {word.strip("()") for word in symbols.split() if "GLIBCXX_" in word}
    versions = [tuple(int(part) for part in name.removeprefix("GLIBCXX_").split(".")) for name in needed]
    assert max(versions) <= (3, 4, 21)


@pytest.mark.slow
def test_a_real_build_in_another_process(tmp_path):
    extension()
    code = f"from outcore.optim import build_extension; print(build_extension({str(tmp_path)!r}))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ExtensionBackend(library_path=Path(done.stdout.strip())).name.startswith("extension")
