from pathlib import Path

import pytest

from outcore.common.quantities import GIB
from outcore.install.errors import InstallError
from outcore.install.options import parse_options
from outcore.install.requirement_set import NEEDED_BYTES, choose_set, read_pins
from outcore.machine import Gpu
from tests.install.fakes import REPOSITORY, gpu_machine, machine
from tests.refused import refused


def choose(which, requested: str = "auto", **more):
    return choose_set(which, requested, REPOSITORY, **more)


@pytest.mark.parametrize(("which", "name", "torch", "cupy"), [
    (machine(), "cpu", "2.13.0", None), (gpu_machine(), "cuda13", "2.13.0", "cupy-cuda13x"),
    (gpu_machine("590.1", "13.1"), "cuda13", "2.13.0", "cupy-cuda13x"),
    (gpu_machine("570.86.15", "12.8"), "cuda12", "2.10.0", "cupy-cuda12x"),
    (gpu_machine("525.60", "12.0"), "cuda12", "2.10.0", "cupy-cuda12x"),
    (gpu_machine(capability=(7, 0)), "cuda12", "2.10.0", "cupy-cuda12x"),
    (gpu_machine(capability=None), "cuda13", "2.13.0", "cupy-cuda13x"),
    (gpu_machine(is_wsl2=True), "cuda13", "2.13.0", "cupy-cuda13x"),
    (machine(os_family="windows", os_name="Windows 11"), "windows", "2.13.0", None),
    (gpu_machine(os_family="windows", os_name="Windows 11"), "windows", "2.13.0", None),
])  # fmt: skip
def test_set_by_machine(which, name: str, torch: str, cupy: str | None) -> None:
    chosen = choose(which)
    assert chosen.name == name and chosen.pins["torch"] == torch and chosen.reason
    assert {p for p in chosen.pins if p.startswith("cupy")} == ({cupy} if cupy else set())
    assert chosen.accelerator == ("cuda" if name.startswith("cuda") else "cpu")
    assert ("deepspeed" in chosen.pins) is (name != "windows")
    assert NEEDED_BYTES[name] > 0


def test_old_gpu_with_a_new_driver_says_why_cuda_12() -> None:
    assert "7.0" in choose(gpu_machine(capability=(7, 0))).warnings[0]


def test_the_oldest_of_several_gpus_counts() -> None:
    mixed = gpu_machine()
    mixed = machine(
        gpus=(*mixed.gpus, Gpu(1, "V100", 16 * GIB, (7, 0))), driver_version="580", cuda_driver_version="13.0"
    )
    assert choose(mixed).name == "cuda12"


@pytest.mark.parametrize(("which", "requested", "what", "fix"), [
    (gpu_machine("470.82", "11.4"), "auto", "too old", "ubuntu-drivers"),
    (gpu_machine("470.82", "11.4", is_wsl2=True), "auto", "too old", "in Windows"),
    (gpu_machine("999", None), "auto", "too old", "--set cpu"),
    (gpu_machine("570.86", "12.8"), "cuda13", "--set cuda13 cannot work", "leave --set out"),
    (machine(os_family="windows", os_name="Windows 11"), "cuda13", "native Windows", "wsl --install"),
    (machine(), "windows", "native Windows", "leave --set out"),
    (machine(notes=("this is WSL 1, which has no GPU",)), "auto", "WSL 1", "set-version"),
])  # fmt: skip
def test_what_cannot_work_is_refused(which, requested: str, what: str, fix: str) -> None:
    with pytest.raises(InstallError) as caught:
        choose(which, requested)
    assert what in caught.value.what and fix in caught.value.fix and caught.value.why


def test_asked_for_sets_and_other_systems() -> None:
    assert choose(gpu_machine(), "cpu").name == "cpu"
    assert choose(machine(), "cuda12").name == "cuda12"  # for building an image on a machine without a GPU
    assert "not tested" in choose(machine(os_family="macos", os_name="Darwin 24")).warnings[0]


def test_driver_without_tool_is_told() -> None:
    chosen = choose(machine(driver_version="570.1", notes=("NVIDIA driver 570.1 is loaded but ...",)))
    assert chosen.name == "cpu" and "is loaded" in chosen.reason


def test_tests_add_their_pins() -> None:
    chosen = choose(machine(), further=["test"])
    assert "pytest" in chosen.pins and [f.name for f in chosen.files] == ["cpu.txt", "deepspeed.txt", "test.txt"]
    first = chosen.without_deepspeed()
    assert [f.name for f in first.files] == ["cpu.txt", "test.txt"] and set(chosen.pins) - set(first.pins) == {
        "deepspeed"
    }


def test_the_shipped_files_agree() -> None:
    folder = REPOSITORY / "requirements"
    base = read_pins(folder / "base.txt")
    for name in ("cpu", "cuda12", "cuda13", "windows"):
        assert base.items() <= read_pins(folder / f"{name}.txt").items()
    everything = read_pins(folder / "cuda12.txt") | read_pins(folder / "deepspeed.txt")
    assert read_pins(REPOSITORY / "requirements.txt") == everything
    assert set(read_pins(folder / "build.txt")) == {"setuptools", "wheel"}


def test_damaged_requirement_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("# a comment\n\nPyYAML==6.0\nsome_Package[extra]==1.2  # why\n")
    assert read_pins(tmp_path / "a.txt") == {"pyyaml": "6.0", "some-package": "1.2"}
    (tmp_path / "a.txt").write_text("torch>=2\n")
    refused(InstallError, "not a pin", lambda: read_pins(tmp_path / "a.txt"))
    refused(InstallError, "cannot read", lambda: read_pins(tmp_path / "b.txt"))


def test_options() -> None:
    options = parse_options(["--test", "--json", "--", "-k", "x"])
    assert options.test and options.json and options.rest == ("-k", "x") and options.set_name == "auto"
    assert parse_options(["--offload-path", "/d", "--venv", "v"]).venv == Path("v")


@pytest.mark.parametrize(("argv", "message"), [
    (["--check", "--run"], "only verifies"), (["--check", "--dry-run"], "only verifies"),
    (["--run", "--test"], "two jobs"), (["--", "x"], "arguments after --"),
    (["--dry-run", "--test", "--", "x"], "runs nothing"), (["--set", "rocm"], "invalid choice"),
    (["--chekc"], "unrecognized"),
])  # fmt: skip
def test_wrong_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv)
    assert caught.value.code == 2 and message in capsys.readouterr().err
