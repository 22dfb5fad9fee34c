"""Main function of the probe: options, the run, what is printed and written, and the exit code."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from outcore.probe.bench.drive_file import TestPathError, remove_own_files
from outcore.probe.options import ProbeOptions, UsageError, parse_options
from outcore.probe.report.config_file import ConfigFileError, apply_changes
from outcore.probe.report.record import Measured, build_report, measured_machine, to_json, write_text
from outcore.probe.report.show import render
from outcore.probe.run import STAGES, ProbeRun, StageProgress

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM: unwinds like Ctrl-C, so that test files are removed and children killed."""


def main(argv: Sequence[str], root: Path) -> int:
    """Runs everything; returns the exit code. `root` is the repository."""
    signal.signal(signal.SIGTERM, _terminate)
    logging.getLogger("outcore.staging").setLevel(logging.ERROR)  # the pool's notes are among our warnings
    options: ProbeOptions | None = None
    try:
        options = parse_options(argv, root)
        progress = StageProgress((*STAGES, "report"))
        found = ProbeRun(options, progress).run()
        progress.stage("report")
        written, text = _write(options, found)
        out = sys.stderr if options.json else sys.stdout
        print(render(found), file=out)
        for line in (*written, *_apply(options, found)):
            print(line, file=out)
        if options.json:
            sys.stdout.write(text)
        return 0
    except (UsageError, TestPathError, ConfigFileError) as error:
        print(f"gds_optimizer: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Terminated:
        print(f"gds_optimizer: terminated; {_clean_up(options)}, no report was written", file=sys.stderr)
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        print(f"gds_optimizer: interrupted; {_clean_up(options)}, no report was written", file=sys.stderr)
        return EXIT_INTERRUPTED


def _clean_up(options: ProbeOptions | None) -> str:
    """Removes what a signal between two contexts left; the words for it. A second Ctrl-C does not stop this."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    left = remove_own_files(options.paths if options is not None else ())
    signal.signal(signal.SIGINT, former)
    return f"remove {', '.join(map(str, left))} by hand" if left else "the test files are removed"


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _write(options: ProbeOptions, found: Measured) -> tuple[list[str], str]:
    """Report and machine profile; (lines that say so, the report's text)."""
    logs = options.logs_dir
    text = to_json(build_report(found))
    lines = []
    profile = measured_machine(found).to_json() + "\n"
    for name, file, content in (
        ("report", "gds_report.json", text),
        ("machine profile", "machine_profile.json", profile),
    ):
        path = logs / file
        try:
            write_text(path, content)
        except OSError as error:
            raise UsageError(
                f"the {name} cannot be written to {path} ({error}): name another place with --logs"
            ) from error
        lines.append(f"{name}: {path}")
    return lines, text


def _apply(options: ProbeOptions, found: Measured) -> list[str]:
    if not options.apply:
        return [f"nothing was changed in {options.config_path}; --apply writes these settings into it"]
    changed = apply_changes(options.config_path, found.settings.changes(), create=options.create)
    if not changed:
        return [f"{options.config_path} has these settings already"]
    kept = f" (the former one is {options.config_path.name}.bak)" if options.config.exists else ""
    return [f"applied to {options.config_path}{kept}:", *(f"  {line}" for line in changed)]
