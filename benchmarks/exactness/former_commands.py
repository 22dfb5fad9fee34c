"""Do former command lines, YAML and JSON files still mean the same? Two checkouts resolve the same ones, side by side.

    git worktree add /tmp/former COMMIT
    python benchmarks/exactness/former_commands.py /tmp/former [--decisions] [--bits]

Command lines are those of the former checkout's docs, scripts and tests (lists of flags in them), each as its parser
understood it; what an engine was told is compared for those of the docs and for the shipped DeepSpeed files. Exit code
1 when anything differs that `REASONS` does not explain.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"(?:train_model|performance_test)\.py((?: --?[^`|#\n\\]*)?(?:\\\n[^`|#\n\\]*)*)")
RAM_BYTES = 60 << 30
REASONS: dict[str, str] = {
    "unknown": "a setting that came later; the former program refused the line",
    "num_slots": "16 slots of a lane where homes are pageable: pinned copies were slow with 4",
    "staging_bytes": "on a GPU more than 8 GiB is pinned where homes need it; on the CPU what the slots need",
}
"""Name of what differs -> why that is meant."""
FORMER_DEFAULTS = {
    "nvme_offload_gradients": False, "aio_block_size": 1 << 20, "aio_queue_depth": 8, "pin_memory": True,
    "max_in_cpu_gb": 1.0,
}  # fmt: skip
"""Fields that were never unsaid -> what stood there; today None, and resolving chooses the same."""


class Decided(BaseException):
    """What the engine was told; ends the command before data is read."""


def docs_commands(root: Path) -> list[list[str]]:
    """Flags of every command line of the docs and of the scripts' own texts."""
    found: list[list[str]] = []
    for path in [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("*.py"), *root.glob("examples/*.py")]:
        for match in COMMAND.finditer(path.read_text(encoding="utf-8")):
            words = re.split(r"\s{2,}(?!-)", match.group(1).replace("\\\n", " ").strip())[0]
            try:
                argv = [word for word in shlex.split(words) if not re.search(r"[<>…\[\]]|\.\.\.", word)]
            except ValueError:
                continue
            if argv and argv not in found and argv[0].startswith("--") and "--help" not in argv:
                found.append([word.rstrip(".,;:)") if word.startswith("--") else word for word in argv])
    return found


def tests_commands(root: Path) -> list[list[str]]:
    """Lists of texts in the tests that begin with a flag."""
    found: list[list[str]] = []
    for path in sorted(root.glob("tests/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.List) and all(isinstance(one, ast.Constant) for one in node.elts):
                argv = [str(one.value) for one in node.elts if isinstance(one, ast.Constant)]
                if argv and argv[0].startswith("--") and "--help" not in argv and argv not in found:
                    found.append(argv)
    return found


def dump(argv_list: list[list[str]], decided: list[list[str]]) -> dict[str, Any]:
    """In a checkout's own process: what each command line is understood as, and what the engine is told."""
    try:
        from outcore.train.configure import parse_config
    except ImportError:
        from outcore.train.configure.arguments import parse_config  # pyright: ignore
    found: dict[str, Any] = {}
    for argv in argv_list:
        try:
            found[shlex.join(argv)] = dataclasses.asdict(parse_config(argv))
        except (ValueError, SystemExit) as error:
            found[shlex.join(argv)] = {"refused": str(error)}
    for argv in decided:
        found["decides: " + shlex.join(argv)] = decision_of(argv)
    return found


def decision_of(argv: list[str]) -> Any:
    """What an engine is told by this command line on a machine with so much RAM."""
    import outcore.train.run as run

    main = getattr(run, "main", None)
    try:
        from outcore.train.run import planned as place
    except ImportError:
        place: Any = run
    if not hasattr(place, "_decide"):
        place._decide = place.decide

    def stop(*args: Any, **more: Any) -> Any:
        raise Decided(place._decide(*args, **more).record())

    place.decide = stop
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("outcore") and hasattr(module, "available_ram_bytes"):
            module.available_ram_bytes = lambda *args, **more: RAM_BYTES  # pyright: ignore
    assert main is not None
    with tempfile.TemporaryDirectory() as folder:
        folders = [f"--{kind}_dir={folder}/{kind}" for kind in ("checkpoint", "log", "export")]
        try:
            return {"refused": main([*argv, *folders])}
        except Decided as told:
            return told.args[0]


def in_checkout(root: Path, argv_list: list[list[str]], decided: list[list[str]]) -> dict[str, Any]:
    """`dump` by the code of that checkout."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "in.json", Path(folder) / "out.json"
        given.write_text(json.dumps([argv_list, decided]))
        command = [sys.executable, str(Path(__file__).resolve()), "--dump", str(given), str(out)]
        subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=True, stdout=sys.stderr)
        return json.loads(out.read_text())


def differences(was: Any, now: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(name, former value, today's) of what both have and hold differently; None for what the newer left out."""
    if isinstance(was, dict) and isinstance(now, dict):
        if "refused" in was:
            return [] if "refused" in now else [("unknown", was["refused"], "taken")]
        if "refused" in now:
            return [("refused", "taken", now["refused"])]
        return [one for key in was if key in now for one in differences(was[key], now[key], key)]
    same = was == now or [was] == now or (isinstance(was, list) and [str(v) for v in was] == [str(now)])
    if name in FORMER_DEFAULTS and now is None and was == FORMER_DEFAULTS[name]:
        return []
    return [] if same else [(name, was, now)]


def bits(root: Path, argv: list[str]) -> str:
    """Losses of a short run and a digest of its exported weights, by the code of that checkout."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [f"--{kind}_dir={folder}/{kind}" for kind in ("checkpoint", "log", "export")]
        more = ["--run_name", "r", "--report_to", "none", f"--data_cache_dir={folder}/data"]
        command = [sys.executable, str(root / "train_model.py"), *argv, *folders, *more]
        subprocess.run(
            command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=True, stdout=subprocess.DEVNULL
        )
        lines = map(json.loads, (Path(folder) / "log/r/metrics.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if "loss" in line]
        shards = sorted((Path(folder) / "export/r").glob("*.safetensors"))
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in shards)).hexdigest()[:16]
        return f"{losses} {digest}"


def main() -> int:
    """Compare; a line for each difference with its reason."""
    if sys.argv[1:2] == ["--dump"]:
        given, out = map(Path, sys.argv[2:])
        out.write_text(json.dumps(dump(*json.loads(given.read_text())), default=str))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("former", type=Path)
    parser.add_argument("--decisions", action="store_true", help="and what the engine is told, a few seconds each")
    parser.add_argument("--bits", action="store_true", help="and losses and weights of short runs")
    args = parser.parse_args()
    former = args.former.resolve()
    docs = docs_commands(former)
    files = [former / "deepspeed_config.json", *sorted((former / "config").glob("*.json"))]
    decided: list[list[str]] = []
    if args.decisions:
        decided = [_on_own_data(argv) for argv in docs if "--model_name_or_path" not in argv]
        for engine in ("stream", "deepspeed"):
            decided += [["--engine", engine, "--deepspeed_config", str(path)] for path in files]
    lines = [*docs, *tests_commands(former)]
    was, now = in_checkout(former, lines, decided), in_checkout(ROOT, lines, decided)
    unexplained = 0
    told: dict[str, int] = {}
    for line in was:
        for name, before, after in differences(was[line], now[line]):
            told[name] = told.get(name, 0) + 1
            if name not in REASONS:
                unexplained += 1
                print(f"{line}\n    {name}: {before!r} -> {after!r}")
    for name in sorted(told.keys() & REASONS.keys()):
        print(f"{told[name]} x {name}: {REASONS[name]}")
    taken = sum("refused" not in value for value in was.values())
    print(f"{len(docs)} command lines of docs and {len(lines) - len(docs)} of tests, {taken} taken "
          f"by the former program, {len(decided)} decisions; {unexplained} differences without a reason")  # fmt: skip
    for argv in BITS if args.bits else ():
        before, after = bits(former, argv), bits(ROOT, argv)
        unexplained += before != after
        print(f"{shlex.join(argv)}: {'the same bits' if before == after else f'{before} -> {after}'}")
    return 1 if unexplained else 0


def _on_own_data(argv: list[str]) -> list[str]:
    """Without data sets and drives that only the docs have."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if not skip and word not in ("--dataset", "--nvme_offload_path"):
            kept.append(word)
        skip = word in ("--dataset", "--nvme_offload_path")
    return kept


SHORT = ["--max_steps", "2", "--sample_tokens", "0", "--eval_steps", "0", "--max_train_samples", "200"]
SHORT += ["--max_eval_samples", "4", "--max_grad_norm", "0"]
"""Without clipping: on a CPU the global norm is summed more exactly than it was, so clipped steps differ by 1e-7."""
BITS = (
    SHORT,
    [*SHORT, "--engine", "deepspeed"],
    [*SHORT, "--precision", "bf16", "--state_format", "split8", "--lora_r", "4"],
)

if __name__ == "__main__":
    sys.exit(main())
