"""Checks that only the environment's own interpreter can make; run by the installer as `python -m
outcore.install.verify.probe`.

    build BUILDER                       build one DeepSpeed extension (compiler output on stdout)
    packages RESULTS ACCELERATOR        use every package once, for real
    deepspeed RESULTS ACCELERATOR NAME,NAME   load the built extensions, take one ZeRO-3 step

Each finding is a line of JSON in the file RESULTS, written before and after its trial, so that a part that brings the
process down is known by name. Costs 8-12 s of imports each; the two checks run side by side."""

from __future__ import annotations

import sys
from pathlib import Path

from outcore.install.verify.probes.recorder import ProbeRecorder


def main(arguments: list[str]) -> None:
    if arguments[0] == "build":
        from outcore.install.verify.probes.deepspeed import build

        build(arguments[1])
        return
    recorder, accelerator = ProbeRecorder(Path(arguments[1])), arguments[2]
    if arguments[0] == "packages":
        from outcore.install.verify.probes.packages import check_packages

        check_packages(recorder, accelerator)
    elif arguments[0] == "deepspeed":
        from outcore.install.verify.probes.deepspeed import check_deepspeed

        check_deepspeed(recorder, accelerator, [name for name in arguments[3].split(",") if name])
    else:
        raise SystemExit(f"unknown probe {arguments[0]!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
