"""First call of every root script: run in an interpreter that has outcore's dependencies, or say how to get one.

`python train_model.py` started with a bare interpreter runs again inside `.venv` with the same arguments. Written in
the syntax of any Python, so that one too old for the rest of outcore gets as far as the one line that says so."""

import os
import subprocess
import sys

MINIMUM_PYTHON = (3, 11)
# What makes an environment outcore's.
NEEDED_MODULES = ("torch", "transformers")


def ensure_environment(script):
    # type: (str) -> None
    """Return when this interpreter can run `script` (its `__file__`); else re-execute it in `.venv` or exit.

    Exits with one line for people when Python is too old, or when there is no environment to change to. Also puts the
    interpreter's own folder on PATH, because DeepSpeed looks there for `ninja`."""
    if sys.version_info < MINIMUM_PYTHON:
        sys.exit(
            "outcore needs Python 3.11, 3.12 or 3.13, this is {}.{}: start it with a newer one, "
            "for instance `python3.11 {}`".format(sys.version_info[0], sys.version_info[1], os.path.basename(script))
        )
    import importlib.util

    script = os.path.abspath(script)
    repository = os.path.dirname(script)
    missing = [name for name in NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if not missing:
        add_to_path(os.path.dirname(sys.executable))
        return
    environment = os.path.join(repository, ".venv")
    python = environment_python(environment)
    if os.path.exists(python) and os.path.realpath(sys.prefix) != os.path.realpath(environment):
        command = [python, script]
        command.extend(sys.argv[1:])
        _replace_process(command)
    sys.exit(
        "{} {} not installed for {}: run `python setup.py` once, in {}".format(
            ", ".join(missing), "is" if len(missing) == 1 else "are", sys.executable, repository
        )
    )


def environment_python(environment):
    # type: (str) -> str
    """The interpreter of a virtual environment, on this operating system."""
    if os.name == "nt":
        return os.path.join(environment, "Scripts", "python.exe")
    return os.path.join(environment, "bin", "python")


def add_to_path(directory):
    # type: (str) -> None
    """Make a folder the first of this process's PATH.

    First, not just somewhere: DeepSpeed's extensions are checked by the `ninja` that PATH finds, and another version
    than the one that built them takes them for outdated and compiles for minutes."""
    entries = os.environ.get("PATH", "").split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([directory] + [e for e in entries if e and e != directory])


def _replace_process(command):
    # type: (list[str]) -> None
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # execv returns to the shell at once there
        sys.exit(subprocess.call(command))
    os.execv(command[0], command)
