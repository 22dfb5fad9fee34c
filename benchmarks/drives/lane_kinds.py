"""Kinds of lanes against each other on one machine: default against write-combined slots, one stream a direction
against two, drive -> GPU through slots against kvikio straight into GPU memory, and small transfers.

    python benchmarks/drives/lane_kinds.py --path /nvme --seconds 80 --out results.json

Every round runs all measures once, each time in another order; a ratio is taken within its round. `cpu s/GB`: seconds
of this process's cores for each GB moved, from the same rounds. Without a GPU the same transfers run through plain
memory (a dry run). Exit code 2 when a measure failed or bytes came out wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lanes import machine

from outcore.common.quantities import GB, GIB, KIB, MIB
from outcore.staging import AT_ONCE, DownloadLane, LaneSettings, PinnedPool, UploadLane
from outcore.storage import BlockFile, DriveAccess, StorageEngine, TensorSpec
from outcore.storage.store import TensorStore

SLOT_BYTES, NUM_SLOTS, DRIVE_SLOTS = 16 * MIB, 4, 12
SMALL_BYTES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
SMALL_REPEATS = 12
Measure = Callable[[], int]
"""Moves bytes, waits for them, tells how many."""


def ram_measures(undo: ExitStack, pool: PinnedPool, device: torch.device, n_bytes: int) -> dict[str, Measure]:
    """RAM <-> device: pageable homes through slots (default or write-combined), pinned ones without."""
    pageable = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8)
    pinned = undo.enter_context(pool.lease(n_bytes, "pinned home")).tensor
    target, source = torch.zeros(n_bytes, dtype=torch.uint8, device=device), pageable.to(device)
    found: dict[str, Measure] = {}
    for combined in (False, True) if pool.write_combined_bytes else (False,):
        for streams in (1, 2):
            settings = LaneSettings(SLOT_BYTES, NUM_SLOTS, combined, num_streams=streams)
            up = undo.enter_context(UploadLane(pool, None, device, settings, f"up {combined} {streams}"))
            down = None
            if not combined:
                down = undo.enter_context(DownloadLane(pool, None, device, settings, f"down {streams}"))
            kind = f"{'write-combined' if combined else 'default'} slots, {streams} stream(s)"
            found[f"RAM pageable -> GPU, {kind}"] = lambda up=up: up.submit_host(pageable, target, after=AT_ONCE).wait()
            if down is None:
                continue

            def pieces(up: UploadLane = up) -> int:
                parts = n_bytes // 4
                sent = [
                    up.submit_host(
                        pinned[i * parts : (i + 1) * parts], target[i * parts : (i + 1) * parts], after=AT_ONCE
                    )
                    for i in range(4)
                ]
                return sum(transfer.wait() for transfer in sent)

            def both(up: UploadLane = up, down: DownloadLane = down) -> int:
                moving = (
                    up.submit_host(pageable, target, after=AT_ONCE),
                    down.submit_host(source, pinned, after=AT_ONCE),
                )
                return sum(transfer.wait() for transfer in moving)

            found[f"RAM pinned -> GPU, no slots, {streams} stream(s)"] = pieces
            found[f"GPU -> RAM pinned, no slots, {streams} stream(s)"] = lambda down=down: down.submit_host(
                source, pinned, after=AT_ONCE
            ).wait()
            found[f"both ways at once, {streams} stream(s)"] = both
    return found


def open_stores(
    undo: ExitStack, path: Path, n_bytes: int, notes: dict[str, str]
) -> tuple[dict[str, tuple[TensorStore, Any]], torch.Tensor]:
    """A store for each way that this machine can go, by name, with the bytes that each holds."""
    data = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8)
    stores: dict[str, tuple[TensorStore, Any]] = {}
    for name, access in (
        ("posix", DriveAccess("posix")),
        ("kvikio", DriveAccess("kvikio")),
    ):
        try:
            engine: StorageEngine = access.open()
        except RuntimeError as reason:
            notes[name] = str(reason)
            continue
        undo.callback(engine.close)
        folder = path / f"outcore-lane-kinds-{os.getpid()}-{name}"
        store = TensorStore.create([folder], [TensorSpec("weights", torch.uint8, (n_bytes,))], engine=engine)
        undo.callback(folder.rmdir)
        undo.callback(store.delete)
        store.submit_write("weights", data).wait()
        store.commit()
        stores[name] = store, engine
    return stores, data


def drive_measures(
    undo: ExitStack,
    pool: PinnedPool,
    device: torch.device,
    stores: dict[str, tuple[TensorStore, Any]],
    data: torch.Tensor,
) -> dict[str, Measure]:
    """Parameters from a store to the device: through slots, and by kvikio without."""
    found: dict[str, Measure] = {}
    target = torch.zeros_like(data, device=device)
    parts = [(at, min(at + 128 * MIB, len(data))) for at in range(0, len(data), 128 * MIB)]

    def measure(name: str, store: TensorStore, settings: LaneSettings) -> None:
        lane = undo.enter_context(UploadLane(pool, None, device, settings, name))

        def move() -> int:
            sent = [
                lane.submit_stored(store, "weights", target[at:to], at, after=AT_ONCE, label="layer")
                for at, to in parts
            ]
            return sum(transfer.wait() for transfer in sent)

        target.zero_()
        if move() != len(data) or not torch.equal(target.cpu(), data):
            raise RuntimeError(f"{name}: the bytes came out wrong")
        found[name] = move

    for streams in (1, 2):
        for combined in (False, True) if pool.write_combined_bytes else (False,):
            kind = "write-combined" if combined else "default"
            settings = LaneSettings(SLOT_BYTES, DRIVE_SLOTS, combined, num_streams=streams)
            measure(f"drive -> GPU, posix + {kind} slots, {streams} stream(s)", stores["posix"][0], settings)
    if "kvikio" in stores:
        measure("drive -> GPU, kvikio + default slots", stores["kvikio"][0], LaneSettings(SLOT_BYTES, DRIVE_SLOTS))
        measure("drive -> GPU, kvikio without slots", stores["kvikio"][0], LaneSettings(SLOT_BYTES, 1, direct=True))
    return found


def small_transfers(
    undo: ExitStack, pool: PinnedPool, device: torch.device, file: Path, engines: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Median seconds of one transfer, by size and path: a plain read and copy, a lane, kvikio without slots."""
    lane = undo.enter_context(UploadLane(pool, engines["posix"], device, LaneSettings(SLOT_BYTES, 2), "small"))
    out = torch.zeros(max(SMALL_BYTES), dtype=torch.uint8, device=device)
    opened = undo.enter_context(BlockFile(file, "r"))
    fd = os.open(file, os.O_RDONLY)
    undo.callback(os.close, fd)
    memory = torch.zeros(max(SMALL_BYTES), dtype=torch.uint8)

    def plain(offset: int, size: int) -> None:
        if os.preadv(fd, [memory[:size].numpy().data], offset) != size:
            raise RuntimeError("a short read")
        out[:size].copy_(memory[:size])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    paths: dict[str, Callable[[int, int], object]] = {
        "plain": plain,
        "lane": lambda offset, size: lane.submit(opened, offset, out[:size], after=AT_ONCE).wait(),
    }
    if "kvikio" in engines:
        paths["kvikio"] = lambda offset, size: engines["kvikio"].submit_read(opened, offset, out[:size]).wait()
    chooser, result = random.Random(0), {}
    for size in SMALL_BYTES:
        times: dict[str, list[float]] = {name: [] for name in paths}
        for turn in range(SMALL_REPEATS + 1):
            for name, move in paths.items():
                offset = chooser.randrange((opened.size_bytes - size) // 4096) * 4096
                os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
                begin_s = time.perf_counter()
                move(offset, size)
                if turn:
                    times[name].append(time.perf_counter() - begin_s)
        result[str(size)] = {name: statistics.median(seconds) for name, seconds in times.items()}
    return result


def run_rounds(table: dict[str, Measure], seconds: float, least: int) -> list[dict[str, tuple[float, float]]]:
    """(bytes a second, CPU seconds a byte) of every measure, round by round; the first round warms up."""
    rounds: list[dict[str, tuple[float, float]]] = []
    end_s, turn = time.monotonic() + seconds, 0
    while turn <= least or time.monotonic() < end_s:
        names = list(table)
        random.Random(turn).shuffle(names)
        found = {}
        for name in names:
            begin_s, cpu_s = time.perf_counter(), time.process_time()
            moved = table[name]()
            found[name] = moved / (time.perf_counter() - begin_s), (time.process_time() - cpu_s) / moved
        if turn:
            rounds.append(found)
        turn += 1
    return rounds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path("."), help="directory on the drive to measure")
    parser.add_argument("--seconds", type=float, default=60.0, help="rounds go on for so long")
    parser.add_argument("--rounds", type=int, default=3, help="at least so many")
    parser.add_argument("--mib", type=int, default=1024, help="size of what is moved")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args(arguments)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    n_bytes, notes = args.mib * MIB, {}
    combined = 2 * (NUM_SLOTS + DRIVE_SLOTS) * SLOT_BYTES if device.type == "cuda" else 0
    pool_bytes = n_bytes + combined + GIB
    with ExitStack() as undo:
        pool = undo.enter_context(PinnedPool(pool_bytes, device=device, write_combined_bytes=combined, probe=False))
        stores, data = open_stores(undo, args.path, n_bytes, notes)
        table = ram_measures(undo, pool, device, n_bytes)
        table |= drive_measures(undo, pool, device, stores, data)
        rounds = run_rounds(table, args.seconds, args.rounds)
        file = stores["posix"][0].extent("weights")[0].path
        small = small_transfers(undo, pool, device, file, {name: engine for name, (_, engine) in stores.items()})
    print(f"{machine(device)}, {len(rounds)} rounds of {args.mib} MiB; not run: {notes or 'nothing'}")
    print(f"{'measure':<62} {'GB/s':>7} {'lowest':>7} {'highest':>7} {'cpu s/GB':>9}")
    for name in table:
        rates = [found[name][0] / GB for found in rounds]
        cpu = statistics.median(found[name][1] for found in rounds) * GB
        print(f"{name:<62} {statistics.median(rates):>7.2f} {min(rates):>7.2f} {max(rates):>7.2f} {cpu:>9.3f}")
    for size, times in small.items():
        print(
            f"one transfer of {int(size) // KIB} KiB: " + ", ".join(f"{k} {v * 1e6:.0f} us" for k, v in times.items())
        )
    if args.out:
        result = {"machine": machine(device), "mib": args.mib, "rounds": rounds, "small_s": small, "not_run": notes}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, RuntimeError, ValueError) as error:
        print(f"the measurement failed: {error}", file=sys.stderr)
        sys.exit(2)
