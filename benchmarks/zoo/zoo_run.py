"""Tries every causal (or image-text) architecture of transformers and keeps what was found.

    python benchmarks/zoo/zoo_run.py                       # those that are new or whose code or versions have changed
    python benchmarks/zoo/zoo_run.py --all                 # every one again (about ten minutes on two cores)
    python benchmarks/zoo/zoo_run.py llama hy_v4           # these
    python benchmarks/zoo/zoo_run.py --pictures            # image-text architectures instead, under any trainer
    python benchmarks/zoo/zoo_table.py                     # docs/models.md and outcore's own table from the results

Results: one record for each architecture in results/architectures.json (those with pictures as pictures/NAME), with a
key of what it depends on. Each is tried in a process of its own (forked, so that torch is imported once) with limits of
time and memory, because a model's own code may end or hang it. Exit code 1 when a record says crash or wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
RESULTS = ROOT / "benchmarks" / "results" / "architectures.json"
PICTURES = "pictures/"
"""Before the names of image-text architectures among the records."""
LIMIT_S = 180.0
LIMIT_BYTES = 8 << 30
DEPENDS_ON = ("outcore/model", "outcore/flow", "outcore/engine/stream", "benchmarks/zoo/zoo_trial.py")
PICTURES_DEPEND_ON = ("outcore/hf", "outcore/model/trial", "benchmarks/zoo/zoo_pictures.py")


def main(argv: list[str] | None = None) -> int:
    """Try what is asked for or out of date; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--pictures", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    _be_quiet()
    if args.pictures:
        from zoo_pictures import architectures
        from zoo_pictures import try_pictures as trial
    else:
        from zoo_shapes import architectures
        from zoo_trial import try_architecture as trial
    records: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    known, before = architectures(), PICTURES * args.pictures
    for name in [n for n in records if n.startswith(PICTURES) == args.pictures and n[len(before) :] not in known]:
        del records[name]
    key = current_key(PICTURES_DEPEND_ON if args.pictures else DEPENDS_ON)
    wanted = args.names or [n for n in known if args.all or records.get(before + n, {}).get("key") != key]
    for name in wanted:
        records[before + name] = {**in_child(name, trial), "key": key}
        print(f"{name:<28} {summary(records[before + name])}", flush=True)
        args.out.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")
    bad = [name for name in wanted if is_bad(records[before + name])]
    print(f"{len(wanted)} tried, {len(bad)} crashed or wrong{': ' if bad else ''}{', '.join(bad)}")
    return 1 if bad else 0


def current_key(depends_on: tuple[str, ...] = DEPENDS_ON) -> str:
    """What a record depends on: the versions, and the code that was tried."""
    import torch
    import transformers

    digest = hashlib.sha256()
    for place in depends_on:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    version = torch.__version__.split("+")[0]
    return f"transformers {transformers.__version__}, torch {version}, code {digest.hexdigest()[:12]}"


def in_child(name: str, trial: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """One record, made in a forked process."""
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(name, trial, writing), daemon=True)
    child.start()
    writing.close()
    record: dict[str, Any] | None = None
    try:
        if reading.poll(LIMIT_S):
            record = reading.recv()
    except EOFError:
        pass
    if record is None and child.is_alive():
        child.kill()
        record = {"name": name, "crash": f"it took more than {LIMIT_S:.0f} s"}
    child.join()
    return record or {"name": name, "crash": f"its process ended with exit code {child.exitcode}"}


def _child(name: str, trial: Callable[[str], dict[str, Any]], pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    pipe.send(trial(name))
    pipe.close()


def is_bad(record: dict[str, Any]) -> bool:
    """Whether a record says crash or wrong."""
    return "crash" in record or any(str(value).startswith(("CRASH", "WRONG")) for value in record.values())


def summary(record: dict[str, Any]) -> str:
    """One line for people."""
    if "crash" in record:
        return f"CRASH {record['crash']}"
    words = [record["unbuilt"]] if "unbuilt" in record else []
    if words and "streams" not in record:
        return words[0]
    if record.get("streams"):
        return "; ".join([*words, f"not streamed: {record['streams'][:160]}"])
    if "answer" in record:
        return "; ".join(["streams", *words, *(f"{n}: {record[n]}" for n in ("answer", "steps") if record[n])])
    for name in ("bf16", "bf16_trained", "routers", "steps", "export", "lora", "tiles"):
        if record.get(name):
            words.append(f"{name}: {record[name].splitlines()[0][:160]}")
    return f"streams ({record.get('asked_s', 0):.1f} s); packing {record.get('packing') or 'no'}; " + "; ".join(words)


def _be_quiet() -> None:
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    import zoo_trial  # noqa: F401  imported before the children fork


if __name__ == "__main__":
    sys.exit(main())
