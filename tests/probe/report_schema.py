"""The schema of `logs/gds_report.json` as code (docs/gds.md in words)."""

from typing import Any

from outcore.probe.report.record import LINKS, SCHEMA_VERSION

_NUMBER = (int, float)
_OPTIONAL_NUMBER = (int, float, type(None))
FIELDS: dict[str, tuple[type, ...]] = {
    "schema_version": (int,), "created_at": (str,), "outcore_version": (str,), "effort": (str,), "elapsed_s": _NUMBER,
    "verdict": (str,), "headline": (str,), "reasons": (list,), "why_not": (dict,), "would_change": (list,),
    "ladder": (list,), "links": (dict,), "compute": (dict, type(None)), "optimizer": (dict, type(None)),
    "drives": (list,), "staging": (dict, type(None)), "latency": (dict, type(None)), "pcie": (dict, type(None)),
    "measurements": (list,), "settings": (dict,), "machine": (dict,), "warnings": (list,), "skipped": (list,),
}  # fmt: skip


def check_report(report: Any) -> list[str]:
    """What is wrong with a report, a sentence each; empty when it follows the schema."""
    if not isinstance(report, dict):
        return [f"a report is a JSON object, got {type(report).__name__}"]
    problems = [f"{name} is missing" for name in FIELDS if name not in report]
    for name, kinds in FIELDS.items():
        if name in report and not isinstance(report[name], kinds):
            problems.append(f"{name} has the type {type(report[name]).__name__}")
    problems += [f"{name} is not part of the schema" for name in report if name not in FIELDS]
    if report.get("schema_version") != SCHEMA_VERSION:
        problems.append(f"schema_version is {report.get('schema_version')!r}, this outcore writes {SCHEMA_VERSION}")
    links = report.get("links")
    if isinstance(links, dict):
        wanted = {f"{link}_gb_per_s" for link in LINKS}
        problems += [f"links lacks {name}" for name in sorted(wanted - set(links))]
        problems += [
            f"links.{name} is {value!r}, not a rate"
            for name, value in links.items()
            if not isinstance(value, _OPTIONAL_NUMBER) or isinstance(value, bool) or (value is not None and value < 0)
        ]
    return problems
