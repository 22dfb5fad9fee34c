"""The verification: rows of the host, plus what two children of the environment's interpreter found, side by side.

A child that crashes (a segmentation fault in an extension, say) costs the row of the part it was trying, which is
named, and marks what came after it as not tried."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outcore.common.quantities import format_s
from outcore.install.environment import Environment
from outcore.install.extensions import PROBE, BuildResult, build_key, extensions_for, is_built, missing_prerequisite
from outcore.install.requirement_set import RequirementSet, normalise
from outcore.install.verify.host_checks import extension_fix
from outcore.install.verify.rows import DEGRADED, MISSING, OK, ReportRow

# part -> (package whose pin it must have, required). cupy allocates the write-combined half of the staging pool,
# kvikio reads into GPU memory: training stages without either.
PACKAGE_PARTS = {
    "torch": ("torch", True),
    "transformers": ("transformers", True),
    "tokenizers": ("tokenizers", True),
    "datasets": ("datasets", True),
    "peft": ("peft", True),
    "safetensors": ("safetensors", True),
    "psutil": ("psutil", True),
    "NVML": ("nvidia-ml-py", False),
    "cupy": ("cupy", False),
    "kvikio": ("kvikio", False),
    "TensorBoard": ("tensorboard", False),
    "matplotlib": ("matplotlib", False),
}
OPTIMIZER_USE = "the streaming engine's optimizer at the speed of memory (in torch several times slower)"
PROBE_TIMEOUT_S = 180.0
LOOK_S = 0.5
"""Seconds between two looks at which part is being tried."""


class RunningProbe:
    """A probe child; its findings are read from its results file when it has ended."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], results: Path, cwd: Path) -> None:
        self._results = results
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            list(command),
            env=dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def finish(
        self, timeout_s: float = PROBE_TIMEOUT_S, tell: Callable[[str], None] = lambda part: None
    ) -> tuple[dict[str, dict[str, Any]], str]:
        """(part -> finding, why the child ended badly or ''). `tell` hears of the part that is being tried."""
        end_s = time.monotonic() + timeout_s
        try:
            while (code := self._code_within(min(LOOK_S, end_s - time.monotonic()))) is None:
                if time.monotonic() >= end_s:
                    raise subprocess.TimeoutExpired(self._process.args, timeout_s)
                if parts := list(read_findings(self._results, "")):
                    tell(parts[-1])
            ended = "" if code == 0 else _how_it_ended(code, self._tail())
        except subprocess.TimeoutExpired:
            self.stop()
            ended = f"no answer within {format_s(timeout_s)}"
        self._output.close()
        return read_findings(self._results, ended), ended

    def _code_within(self, seconds: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=max(0.0, seconds))
        return None

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _tail(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def read_findings(results: Path, ended: str) -> dict[str, dict[str, Any]]:
    """Lines of a results file, the last word on each part; a part begun but never done is what the child died of."""
    findings: dict[str, dict[str, Any]] = {}
    try:
        lines = results.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line being written when the child died
        if record["state"] == "begun":
            record |= {"ok": False, "found": "", "why": ended or "the check did not finish"}
        findings[record["part"]] = record
    return findings


def probe_rows(
    environment: Environment,
    chosen: RequirementSet,
    repository: Path,
    environ: Mapping[str, str],
    build_results: Sequence[BuildResult] = (),
    tell: Callable[[str], None] = lambda part: None,
) -> list[ReportRow]:
    """Start the probes, wait for them, make rows. DeepSpeed is tried where its extensions are built or were to be;
    `tell` hears of each part that is being tried."""
    directory = Path(environ["TORCH_EXTENSIONS_DIR"])
    accelerator = chosen.accelerator
    with_deepspeed = "deepspeed" in chosen.pins
    key = build_key(environment, accelerator)
    built = [e.name for e in extensions_for(accelerator) if is_built(directory, e, key)] if with_deepspeed else []
    python = str(environment.python)
    with tempfile.TemporaryDirectory() as folder:
        packages_file, deepspeed_file = Path(folder) / "packages", Path(folder) / "deepspeed"
        children = [
            RunningProbe(
                [python, "-m", PROBE, "packages", str(packages_file), accelerator], environ, packages_file, repository
            )
        ]
        tries_deepspeed = with_deepspeed and bool(built or build_results)
        if tries_deepspeed:
            command = [python, "-m", PROBE, "deepspeed", str(deepspeed_file), accelerator, ",".join(built)]
            children.append(RunningProbe(command, environ, deepspeed_file, repository))
        try:
            outcomes = [child.finish(tell=tell) for child in children]
        except BaseException:
            for child in children:
                child.stop()
            raise
    rows = package_rows(outcomes[0][0], outcomes[0][1], environment, chosen)
    rows.append(optimizer_row(outcomes[0][0], outcomes[0][1]))
    if tries_deepspeed:
        rows += deepspeed_rows(outcomes[1][0], outcomes[1][1], environment, chosen)
        rows += extension_rows(outcomes[1][0], outcomes[1][1], chosen, built, build_results, directory)
    elif with_deepspeed:
        rows.append(untried_row(environment, chosen))
    else:
        rows.append(
            ReportRow(
                "deepspeed", "not installed", chosen_needed("deepspeed", chosen), MISSING, True, "train inside WSL2"
            )
        )
    return rows


def package_rows(
    findings: Mapping[str, Mapping[str, Any]], ended: str, environment: Environment, chosen: RequirementSet
) -> list[ReportRow]:
    installed = environment.installed()
    rows = []
    for part, (package, required) in PACKAGE_PARTS.items():
        pinned = _pinned_name(package, chosen)
        needed = chosen_needed(pinned or package, chosen)
        version = installed[pinned].version if pinned in installed else ""
        wrong = pinned and version.split("+")[0] != chosen.pins[pinned]
        rows.append(_row(part, findings.get(part), needed, required, ended, version if wrong else None))
    return rows


def rows_of_pip(findings: Mapping[str, Mapping[str, Any]], ended: str) -> list[ReportRow]:
    """Rows of an installation that pip made by itself, whose versions no file of ours pins."""
    rows = [
        _row(part, findings.get(part), package, required, ended, fix=f"`pip install --upgrade {package}`")
        for part, (package, required) in PACKAGE_PARTS.items()
    ]
    return [*rows, optimizer_row(findings, ended)]


def optimizer_row(findings: Mapping[str, Mapping[str, Any]], ended: str) -> ReportRow:
    """The C++ optimizer of the streaming engine: built ahead, or why not; torch is the next best."""
    finding = findings.get("CPU optimizer") or {"ok": False, "why": f"not tried: {ended}"}
    if finding["ok"]:
        return ReportRow("CPU optimizer", f"built: {finding['found']}", OPTIMIZER_USE, OK, False)
    reason = str(finding["why"]).splitlines()[0]
    fix = "`python -m outcore.optim` says more"
    if "compiler" in reason:
        fix = "`sudo apt install g++`, then `python -m outcore.optim`"
    if "no answer" in reason:  # a slow or busy machine: nothing failed
        fix = "`python -m outcore.optim` builds it now, however long it takes; otherwise the first run does"
        return ReportRow("CPU optimizer", f"not built yet: {reason}", OPTIMIZER_USE, DEGRADED, False, fix)
    return ReportRow("CPU optimizer", f"not built: {reason}; torch does its work", OPTIMIZER_USE, DEGRADED, False, fix)


def deepspeed_rows(
    findings: Mapping[str, Mapping[str, Any]], ended: str, environment: Environment, chosen: RequirementSet
) -> list[ReportRow]:
    installed = environment.installed()
    version = installed["deepspeed"].version if "deepspeed" in installed else ""
    wrong = version if version.split("+")[0] != chosen.pins["deepspeed"] else None
    needed = chosen_needed("deepspeed", chosen) + ", one right optimizer step"
    return [_row("deepspeed", findings.get("deepspeed"), needed, True, ended, wrong)]


def untried_row(environment: Environment, chosen: RequirementSet) -> ReportRow:
    """DeepSpeed where its extensions were never asked for: there, and all that our engine wants of it."""
    package = environment.installed().get("deepspeed")
    found = (
        f"{package.version if package else 'nothing'} installed; extensions are not built, only its engine needs them"
    )
    needed = chosen_needed("deepspeed", chosen)
    return ReportRow(
        "deepspeed", found, needed, DEGRADED, False, "`python setup.py --deepspeed` for --engine deepspeed"
    )


def extension_rows(
    findings: Mapping[str, Mapping[str, Any]],
    ended: str,
    chosen: RequirementSet,
    built: Sequence[str],
    build_results: Sequence[BuildResult],
    directory: Path,
) -> list[ReportRow]:
    reasons = {result.name: result.reason for result in build_results if not result.built}
    rows = []
    for extension in extensions_for(chosen.accelerator):
        if extension.name in built:
            anew = f"`rm -rf {directory / extension.name} && python setup.py`"
            finding = findings.get(extension.name)
            rows.append(_row(extension.name, finding, extension.what_for, True, ended, fix=anew))
            continue
        reason = reasons.get(extension.name) or missing_prerequisite() or "not built yet"
        found = f"not built: {reason}"
        rows.append(ReportRow(extension.name, found, extension.what_for, MISSING, True, extension_fix(reason)))
    return rows


def chosen_needed(package: str, chosen: RequirementSet) -> str:
    pin = chosen.pins.get(normalise(package))
    return f"{package} {pin}" if pin else f"{package}: not in the {chosen.name} set"


def _row(
    part: str,
    finding: Mapping[str, Any] | None,
    needed: str,
    required: bool,
    ended: str,
    wrong_version: str | None = None,
    fix: str = "`python setup.py`",
) -> ReportRow:
    if finding is None:
        return ReportRow(part, f"not tried: {ended or 'the check did not reach it'}", needed, MISSING, required, fix)
    if not finding["ok"]:
        return ReportRow(part, finding["why"], needed, MISSING, required, fix)
    if wrong_version is not None:
        found = f"{wrong_version or 'nothing'} installed; {finding['found']}"
        return ReportRow(part, found, needed, DEGRADED, required, fix)
    return ReportRow(part, finding["found"], needed, OK, required)


def _pinned_name(package: str, chosen: RequirementSet) -> str:
    """'cupy' -> 'cupy-cuda13x' and 'kvikio' -> 'kvikio-cu13', whatever the set calls them; '' when it has none."""
    if package in chosen.pins:
        return package
    return next((name for name in chosen.pins if name.startswith(package + "-cu")), "")


def _how_it_ended(code: int, tail: str) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = ": the extension was compiled for another CPU" if name == "SIGILL" else ""
        return f"the check was ended by {name}{hint}"
    return f"the check ended with exit code {code}: {tail or 'it said nothing'}"[:200]
