"""`pip install outcore`: a wheel with compiled kernels, used where there is no compiler, in a folder that is empty."""

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

from outcore.common.ports import free_port
from tests.install.fakes import REPOSITORY
from tests.waiting import until

BACKEND = REPOSITORY / "wheels" / "backend.py"
HERE = f"{platform.system()}-{platform.machine()}".lower()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a user's pip builds it: isolated, by the backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY)]
    subprocess.run(command, check=True, timeout=900)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing of ours but the wheel; other packages are this one's."""
    prefix = tmp_path_factory.mktemp("ein Ort für Räder") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    python = prefix / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, timeout=300)
    (site,) = prefix.glob("lib/python3*/site-packages")
    (site / "others.pth").write_text(str(Path(pytest.__file__).parents[1]) + "\n")
    # An extra of the wheel, which our engine does without.
    (site / "deepspeed.py").write_text("raise ModuleNotFoundError('not installed', name='deepspeed')\n")
    return prefix


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


def bare(folder: Path) -> dict[str, str]:
    """Variables of a machine without a compiler; a home that is there and empty."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    return {"PATH": str(home), "HOME": str(home), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}


def outcore(installed: Path, folder: Path, *arguments: str) -> str:
    """What a command says, both streams; it must end well."""
    command = [installed / "bin" / "outcore", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=bare(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=10).status == 200
    except OSError:
        return False


@pytest.mark.more
def test_the_wheel_says_which_machines_it_is_for(wheel: Path) -> None:
    assert wheel.name.endswith({
        "linux-x86_64": "-py3-none-manylinux_2_17_x86_64.whl", "linux-aarch64": "-py3-none-manylinux_2_17_aarch64.whl",
    }[HERE])  # fmt: skip
    names = zipfile.ZipFile(wheel).namelist()
    assert {"outcore/optim/native/outcore_optim.so", "outcore/config/deepspeed_config.json"} <= set(names)
    assert all(name.startswith(("outcore/", "outcore-")) for name in names)
    library = zipfile.ZipFile(wheel).read("outcore/optim/native/outcore_optim.so")
    versions = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_(2\.[0-9]+)", library)}
    assert versions and max(versions) <= (2, 17)
    assert b"libstdc++" not in library and b"libc++" not in library.replace(b"libc++abi", b"")


@pytest.mark.more
def test_it_trains_in_an_empty_folder_and_nothing_is_compiled(installed: Path, empty: Path) -> None:
    said = outcore(installed, empty, "train", "--max_steps", "2", "--sample_tokens", "0")
    assert re.search(r"step 2/2 \| loss \d", said) and "done: 2 steps" in said
    assert "(extension (" in said and not (installed / "torch_extensions").exists()


@pytest.mark.more
def test_its_kernels_have_the_bits_of_the_reference(installed: Path, empty: Path) -> None:
    """`outcore setup` there is the doctor: each part used once, a step of the optimizer compared with torch's."""
    said = outcore(installed, empty, "setup", "--json")
    rows = {row["part"]: row for row in json.loads(said[said.index("\n{\n") :])["rows"]}
    assert rows["CPU optimizer"]["status"] == "OK"


@pytest.mark.more
def test_it_names_commands_that_are_there(installed: Path, empty: Path) -> None:
    said = " ".join(outcore(installed, empty, "plan", "--model", "tiny", "--nominal").split())  # wrapped at 80 columns
    assert "outcore probe measures" in said and "outcore train --preset tiny" in said
    assert outcore(installed, empty, "setup", "--help").startswith("usage: outcore setup")


@pytest.mark.more
def test_it_serves(installed: Path, empty: Path) -> None:
    model, port = str(next((empty / "final_model").iterdir())), free_port()
    command = [installed / "bin" / "outcore", "serve", model, "--port", str(port), "--context", "128"]
    with subprocess.Popen(command, cwd=empty, env=bare(empty)) as server:
        try:
            until(lambda: server.poll() is not None or answers(f"http://127.0.0.1:{port}/health"), 120)
            body = json.dumps({"prompt": "def ", "max_tokens": 4}).encode()
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=120) as reply:
                assert json.load(reply)["usage"]["completion_tokens"] == 4
        finally:
            server.terminate()


def test_the_backend_knows_its_targets_and_leaves_others_to_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("backend", BACKEND)
    assert spec and spec.loader
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    assert backend.get_requires_for_build_wheel({"target": "windows-amd64"}) == [backend.ZIG]
    with pytest.raises(ValueError, match=r"target=mars is none of linux-x86_64, linux-aarch64, windows-amd64"):
        backend.get_requires_for_build_wheel({"target": "mars"})
    monkeypatch.setattr(backend.platform, "system", lambda: "Darwin")
    assert backend.get_requires_for_build_wheel() == []
