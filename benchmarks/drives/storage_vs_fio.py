"""Drive rates of outcore's storage engine against fio on the same file in the same run: read, write and mixed.

    python benchmarks/drives/storage_vs_fio.py --path /nvme --size-gib 4 --block-mib 8 --depth 8 --repeats 7 \\
        --out result.json

Both sides move the same file with the same block size and the same number of blocks in flight, past the page cache.
Rounds alternate (ours first in one, fio first in the next) and each round gives one ratio, because drives, virtual ones
above all, change their rate from second to second; the table shows medians of the rates, their ratio, and the median
of the per-round ratios ("paired"), which noise moves less.
"mixed" is fio's rw: a sequential read stream and a sequential write stream, half of the bytes each. The target is a
ratio of 0.95.
Exit code: 0 when every ratio reaches --target, 1 when one does not, 2 when fio is missing.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from outcore.common.quantities import GB, GIB, MIB
from outcore.storage import BlockFile, StorageEngine, StorageError, Transfer, aligned_bytes, open_engine

MODES = ("read", "write", "mixed")
FIO_MODE = {"read": "read", "write": "write", "mixed": "rw"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path("."), help="directory on the drive to measure")
    parser.add_argument("--size-gib", type=float, default=2.0, help="size of the test file")
    parser.add_argument("--block-mib", type=float, default=8.0, help="bytes per request")
    parser.add_argument("--depth", type=int, default=8, help="requests in flight")
    parser.add_argument("--repeats", type=int, default=7, help="rounds per mode")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--engine", default="posix", help="outcore engine to measure")
    parser.add_argument("--threads", type=int, help="threads of the engine; default: the depth")
    parser.add_argument("--fio-engines", nargs="+", default=["libaio", "io_uring"], help="the better one counts")
    parser.add_argument("--target", type=float, default=0.95, help="ratio to reach")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    if arguments.size_gib <= 0 or arguments.block_mib <= 0 or arguments.depth < 1 or arguments.repeats < 1:
        parser.error("--size-gib, --block-mib, --depth and --repeats must be positive")
    arguments.block_bytes = round(arguments.block_mib * MIB)
    if arguments.block_bytes % 4096:
        parser.error("--block-mib must be a multiple of 4 KiB")
    arguments.size_bytes = round(arguments.size_gib * GIB) // (2 * arguments.block_bytes) * 2 * arguments.block_bytes
    if not arguments.size_bytes:
        parser.error("--size-gib must hold at least two blocks")
    if not arguments.path.is_dir():
        parser.error(f"--path {arguments.path} is not a directory")
    return arguments


def ours_gb_per_s(engine: StorageEngine, file: BlockFile, mode: str, block_bytes: int, buffers: list) -> float:
    """One pass over the file with len(buffers) blocks in flight."""
    pending: deque[Transfer] = deque()
    begin_s = time.perf_counter()
    for index in range(file.size_bytes // block_bytes):
        if len(pending) == len(buffers):
            pending.popleft().wait()
        writes = mode == "write" or (mode == "mixed" and index % 2 == 1)
        submit = engine.submit_write if writes else engine.submit_read
        block = index // 2 if mode == "mixed" else index  # fio's rw: reads and writes each run from the start on
        pending.append(submit(file, block * block_bytes, buffers[index % len(buffers)]))
    for transfer in pending:
        transfer.wait()
    return file.size_bytes / (time.perf_counter() - begin_s) / GB


def fio_gb_per_s(ioengine: str, path: Path, mode: str, size_bytes: int, block_bytes: int, depth: int) -> float:
    """One pass of fio over the same file: bytes over the time from its first to its last request."""
    command = [
        "fio",
        "--name=outcore",
        f"--filename={path}",
        f"--rw={FIO_MODE[mode]}",
        f"--bs={block_bytes}",
        f"--size={size_bytes}",
        f"--iodepth={depth}",
        f"--ioengine={ioengine}",
        "--direct=1",
        "--thread",
        "--overwrite=1",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    if done.returncode:
        raise RuntimeError(f"fio failed ({done.returncode}): {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    if job["error"]:
        raise RuntimeError(f"fio reports error {job['error']}")
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    return moved / (max(job["read"]["runtime"], job["write"]["runtime"]) / 1000) / GB


def measure(arguments: argparse.Namespace, engine: StorageEngine, file: BlockFile) -> list[dict]:
    buffers = [aligned_bytes(arguments.block_bytes) for _ in range(arguments.depth)]
    for index, buffer in enumerate(buffers):
        buffer[:] = 17 + index  # touched pages, and not zeros
    ours_gb_per_s(engine, file, "write", arguments.block_bytes, buffers)  # no block of the file is unwritten afterwards
    rows = []
    for mode in arguments.modes:
        ours: list[float] = []
        fio: dict[str, list[float]] = {name: [] for name in arguments.fio_engines}
        for round_number in range(arguments.repeats):
            sides = ["ours", *arguments.fio_engines]
            shift = round_number % len(sides)
            for side in sides[shift:] + sides[:shift]:
                if side == "ours":
                    ours.append(ours_gb_per_s(engine, file, mode, arguments.block_bytes, buffers))
                else:
                    rate = fio_gb_per_s(side, file.path, mode, file.size_bytes, arguments.block_bytes, arguments.depth)
                    fio[side].append(rate)
        best = max(fio, key=lambda name: statistics.median(fio[name]))
        row = {
            "mode": mode,
            "ours_gb_per_s": statistics.median(ours),
            "fio_gb_per_s": statistics.median(fio[best]),
            "fio_engine": best,
            "ratio_of_medians": statistics.median(ours) / statistics.median(fio[best]),
            "median_of_ratios": statistics.median(a / b for a, b in zip(ours, fio[best])),
            "ours_all_gb_per_s": ours,
            "fio_all_gb_per_s": fio,
        }
        rows.append(row)
        others = ", ".join(f"{name} {statistics.median(rates):.2f}" for name, rates in fio.items() if name != best)
        print(
            f"{mode:6s} {row['ours_gb_per_s']:8.2f} {row['fio_gb_per_s']:8.2f} {best:10s} "
            f"{row['ratio_of_medians']:7.3f} {row['median_of_ratios']:7.3f}   {others}",
            flush=True,
        )
    return rows


def main() -> int:
    arguments = parse_arguments()
    if shutil.which("fio") is None:
        print("fio is not installed; on Debian and Ubuntu: sudo apt-get install -y fio", file=sys.stderr)
        return 2
    fio_version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    threads = arguments.threads or arguments.depth
    settings = {"num_threads": threads, "block_bytes": arguments.block_bytes} if arguments.engine == "posix" else {}
    test_path = arguments.path / "outcore-storage-benchmark.bin"
    try:
        engine = open_engine(arguments.engine, **settings)
        with BlockFile(test_path, "create", arguments.size_bytes) as file:
            print(
                f"{file.path}: {arguments.size_bytes / GIB:.2f} GiB, blocks of {arguments.block_mib:g} MiB, depth "
                f"{arguments.depth}, {arguments.repeats} rounds, {'direct' if file.direct else 'BUFFERED'} I/O; "
                f"{engine.name} engine with {threads} threads, {fio_version}"
            )
            print("mode       ours      fio  (engine)     ratio  paired   other fio engines, GB/s")
            try:
                rows = measure(arguments, engine, file)
            finally:
                engine.close()
    except (StorageError, RuntimeError) as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    finally:
        test_path.unlink(missing_ok=True)
    if arguments.out:
        result = {
            "schema": 1,
            "path": str(arguments.path.resolve()),
            "size_bytes": arguments.size_bytes,
            "block_bytes": arguments.block_bytes,
            "depth": arguments.depth,
            "repeats": arguments.repeats,
            "engine": arguments.engine,
            "threads": threads,
            "fio_version": fio_version,
            "kernel": platform.release(),
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    worst = min(row["ratio_of_medians"] for row in rows)
    print(f"lowest ratio {worst:.3f}, target {arguments.target}")
    return 0 if worst >= arguments.target else 1


if __name__ == "__main__":
    sys.exit(main())
