"""What the matrix of faults is made of: the preloaded library, a server that forks runs, and what a run may say.

A run under a fault may end in three ways only. It goes on (exit 0) with the very weights of a run that nothing happened
to; it ends with exit 1 or 2 and words that name the path and what to do, without a trace; it is dead (a kill), and the
next start goes on from what it announced last. Anything else is one of the cells that must not be: "silent" (other
weights), "trace", "no path", "lost" (an announced checkpoint is gone), "hang".
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.engine.stream.runs.job import FAST, REPOSITORY, TEXT, same, states

SOURCE = Path(__file__).with_name("preload.c")
MODEL = Path(__file__).with_name("model.json")
STEPS = 4
TIMEOUT_S = 240.0


def build_library(folder: Path) -> Path:
    """preload.c, compiled. CalledProcessError with the compiler's words."""
    target = folder / "preload.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(target), str(SOURCE), "-ldl"], check=True)
    return target


@dataclass(frozen=True)
class Fault:
    """One cell's fault, in the words of preload.c."""

    call: str
    kind: str
    path: str
    """What the path contains; "-": any."""
    nth: int = 1
    times: int = 1

    def __str__(self) -> str:
        return f"{self.call} {self.kind} {self.path} {self.nth} {self.times}"


@dataclass
class Ended:
    """How a run ended and what it said."""

    code: int | None
    said: str


class Server:
    """`server.py` in a process under the library; one run at a time."""

    def __init__(self, library: Path) -> None:
        ours = ("MASTER_PORT", "MASTER_ADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")
        environ = {key: value for key, value in os.environ.items() if key not in ours}
        environ |= {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a parent are not those of its children
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            cwd=REPOSITORY, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        while self._out.readline().strip() != "ready":
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}")

    @property
    def _out(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def run(
        self,
        argv: list[str],
        log: Path,
        fault: Fault | str | None = None,
        fields: dict[str, Any] | None = None,
        count: Path | None = None,
        warms: bool = False,
    ) -> Ended:
        """A run to its end. `count`: a file that is told how often the call came by; `warms`: see `server`."""
        environ = {"OUTCORE_FAULT": str(fault or "")} | ({"OUTCORE_FAULT_COUNT": str(count)} if count else {})
        return self._job({"argv": argv, "environ": environ, "fields": fields or {}, "warms": warms}, log)

    def phase(self, name: str, root: Path, fault: Fault | None = None, count: Path | None = None) -> Ended:
        """One of `phases.PHASES` below `root`; `count` as for `run`."""
        job = {"phase": name, "root": str(root), "fault": str(fault or ""), "count": str(count or "")}
        return self._job(job, root / "log.txt")

    def _job(self, job: dict[str, Any], log: Path) -> Ended:
        log.unlink(missing_ok=True)
        job |= {"log": str(log), "timeout_s": TIMEOUT_S}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        code = json.loads(self._out.readline())
        return Ended(code, log.read_text(errors="replace") if log.exists() else "")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(300)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Server]:
    with closing(Server(build_library(folder))) as made:
        yield made


@dataclass
class World:
    """Runs of one engine below one folder, and what they end with when nothing happens."""

    server: Server
    root: Path
    engine: str
    """stream, or deepspeed with our staging; both with everything on a drive."""
    corpus: Path = field(init=False)
    expected: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.corpus = self.root / "a text.txt"
        self.corpus.write_text("\n\n".join(TEXT.format(i, i * i) * 12 for i in range(60)))
        straight = self.run(self.root / "straight", cache=self.root / "cache", warms=True)
        assert straight.code == 0, straight.said[-3000:]
        self.expected = states(self.root / f"straight/checkpoint/r/step-{STEPS:08d}")

    def argv(self, root: Path, cache: Path, *more: str) -> list[str]:
        engine = ["--engine", "stream"]
        if self.engine == "deepspeed":
            engine = ["--engine", "deepspeed", "--zero_stage", "infinity", "--nvme_offload_path", str(root / "drive")]
            engine += ["--max_in_cpu_gb", "0", "--strict_offload"]
        folders = [f"--{name}_dir={root / name}" for name in ("checkpoint", "log", "export")]
        argv = [word for word in FAST.split() if word not in ("--engine", "stream")]
        argv += ["--dataset", str(self.corpus), *folders, f"--data_cache_dir={cache}", *engine]
        argv += ["--config_file", str(MODEL)]
        argv += ["--max_steps", str(STEPS), "--save_steps", "1", "--save_total_limit", "2"]
        return [*argv, "--resume_from_checkpoint", "auto", *more]

    def fields(self, root: Path) -> dict[str, Any]:
        if self.engine != "stream":
            return {}
        return {"nvme_path": str(root / "drive"), "state_ram_bytes": 0, "weight_ram_bytes": 0, "activations": "nvme"}

    def run(
        self, root: Path, fault: Fault | None = None, *, cache: Path, count: Path | None = None, warms: bool = False
    ) -> Ended:
        root.mkdir(exist_ok=True)
        return self.server.run(self.argv(root, cache), root / "log.txt", fault, self.fields(root), count, warms)

    def verdict(self, root: Path, fault: Fault, *, cache: Path | None = None) -> str:
        """Run under the fault, judge the end, start again without it and judge that."""
        cache = cache or self.root / "cache"
        first = self.run(root, fault, cache=cache)
        word = self._judge(root, first)
        if word not in ("went on", "told", "dead"):
            return f"{word}: {first.said[-600:]}"
        if word == "went on":
            return word
        newest = announced(root)
        again = self.run(root, cache=cache)
        if again.code != 0:
            return f"lost: the next start ended with {again.code}: {again.said[-600:]}"
        if newest and not re.search(rf"resumed from .*step-0*({newest}|{newest + 1}) at", again.said):
            return f"lost: step {newest} was announced, and the next start said {again.said[:600]}"
        if not same(states(root / f"checkpoint/r/step-{STEPS:08d}"), self.expected):
            return "silent: other weights after the next start"
        return word

    def _judge(self, root: Path, ended: Ended) -> str:
        if ended.code is None:
            return "hang"
        if "Traceback (most recent call last)" in ended.said:
            return "trace"
        if ended.code == 0:
            found = states(root / f"checkpoint/r/step-{STEPS:08d}")
            return "went on" if same(found, self.expected) else "silent"
        if ended.code < 0 or ended.code > 128:
            return "dead"
        return "told" if is_told(ended.said) else "no path"


def is_told(said: str) -> bool:
    """Whether the last paragraph that begins with `error:` names a path, and more than the system's number."""
    found = re.split(r"^error: ", said, flags=re.M)
    return len(found) > 1 and "/" in found[-1] and "[Errno" not in found[-1] and len(found[-1]) > 60


def announced(root: Path) -> int:
    """The newest step whose folder has its name."""
    folder = root / "checkpoint/r"
    steps = [int(path.name[5:]) for path in folder.glob("step-*")] if folder.is_dir() else []
    return max(steps, default=0)
