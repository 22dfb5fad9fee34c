"""Command line of `gds_optimizer.py`: checked before anything is measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outcore.common.quantities import GIB, MIB
from outcore.probe.bench.budget import EFFORTS, ProbeEffort
from outcore.probe.bench.drive_file import TestPathError, check_directory
from outcore.probe.bench.lanes import ProbeStaging
from outcore.probe.flags import parser
from outcore.probe.report.config_file import ConfigFileError, ProbeConfig, read_config


class UsageError(ValueError):
    """The command line, a path or the configuration cannot be used; the message is for people."""


@dataclass(frozen=True)
class ProbeOptions:
    """Choice of what to measure and where to write."""

    paths: tuple[Path, ...]
    """Directories on the drives to measure; checked to exist and to be writable."""
    paths_named: bool
    """Whether the user named them (then the fastest becomes outcore.nvme_path)."""
    effort: ProbeEffort
    config_path: Path
    config: ProbeConfig
    logs_dir: Path
    apply: bool = False
    create: bool = False
    json: bool = False
    notes: tuple[str, ...] = ()


def parse_options(argv: Sequence[str], root: Path) -> ProbeOptions:
    """Options from the command line; `root` is the repository (default place of the configuration).

    Raises `UsageError`; argparse itself exits with code 2 for an unknown flag."""
    args = parser(root).parse_args(list(argv))
    config_path = Path(args.config)
    try:
        config = read_config(config_path)
    except ConfigFileError as error:
        raise UsageError(str(error)) from error
    if args.apply and not config.exists and not args.create:
        raise UsageError(
            f"--apply: {config_path} does not exist; name the file with --config, or add --create to make one"
        )
    notes = [config.note] if config.note else []
    paths, named = _paths(args.path, config, notes)
    for path in paths:
        try:
            check_directory(path)
        except TestPathError as error:
            raise UsageError(str(error)) from error
    staging = config.staging
    if args.staging_gib is not None:
        staging = ProbeStaging(int(args.staging_gib * GIB), staging.write_combined)
    return ProbeOptions(
        paths=tuple(paths),
        paths_named=named,
        effort=_effort(args),
        config_path=config_path,
        config=replace(config, staging=staging),
        logs_dir=Path(args.logs),
        apply=args.apply,
        create=args.create,
        json=args.json,
        notes=tuple(notes),
    )


def _paths(named: list[str] | None, config: ProbeConfig, notes: list[str]) -> tuple[list[Path], bool]:
    if named:
        unique = list(dict.fromkeys(Path(path).expanduser().absolute() for path in named))
        return unique, True
    if config.nvme_path:
        path = Path(config.nvme_path).expanduser()
        if path.is_dir():
            return [path.absolute()], False
        notes.append(f"the configuration's nvme_path {path} does not exist: measuring {Path.cwd()} instead")
    return [Path.cwd()], False


def _effort(args: argparse.Namespace) -> ProbeEffort:
    effort = EFFORTS["quick" if args.quick else "full" if args.full else "default"]
    if args.file_mib is not None:
        effort = replace(effort, file_bytes=max(1, int(args.file_mib)) * MIB)
    if args.seconds is not None:
        effort = replace(effort, total_s=float(args.seconds))
    return effort
