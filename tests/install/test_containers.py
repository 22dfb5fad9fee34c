"""Dockerfile and dev container: what they call exists, and an ordinary user runs it."""

import json
import re
import shlex

import pytest

from outcore.install.environment import check_python
from outcore.install.options import SET_NAMES, parse_options
from tests.install.fakes import REPOSITORY

DOCKERFILE = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", " ")


@pytest.mark.parametrize("chosen", ["cpu", "cuda12", "cuda13"])
def test_the_image_is_set_up_by_an_ordinary_user(chosen: str) -> None:
    check_python(re.search(r"^FROM python:([0-9.]+)-", DOCKERFILE, re.M)[1], "the image")  # type: ignore[index]
    before, after = DOCKERFILE.split("\nUSER outcore\n")
    assert "setup.py" not in before and "USER" not in after
    line = re.search(r"^RUN (python setup\.py [^;]*);", after, re.M)[1]  # type: ignore[index]
    options = parse_options(shlex.split(line.replace("${SET}", chosen))[2:])
    assert options.set_name == chosen in SET_NAMES and not options.check
    assert "HOME=/work" in after and "VOLUME /work" in after, "a read-only root has a place to write"


def test_the_dev_container_builds_the_same_file() -> None:
    made = json.loads((REPOSITORY / ".devcontainer" / "devcontainer.json").read_text())
    folder = REPOSITORY / ".devcontainer"
    assert (folder / made["build"]["dockerfile"]).resolve() == REPOSITORY / "Dockerfile"
    assert made["build"]["args"]["SET"] in SET_NAMES and made["remoteUser"] == "outcore"
    flags = shlex.split(made["postCreateCommand"])
    assert parse_options(flags[2:]).test
