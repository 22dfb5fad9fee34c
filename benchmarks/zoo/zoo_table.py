"""The table of architectures in docs/models.md, and the one that `outcore models` prints, from the zoo's raw results.

python benchmarks/zoo/zoo_table.py            # after benchmarks/zoo/zoo_run.py
python benchmarks/zoo/zoo_table.py --check    # exit code 1 when they are not what the results say
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "architectures.json"
DOCS = ROOT / "docs" / "models.md"
PACKAGED = ROOT / "outcore" / "engine" / "stream" / "check" / "architectures.json"
BEGIN, END = "<!-- zoo: written by benchmarks/zoo/zoo_table.py -->", "<!-- zoo: end -->"
SEEN, SEEN_END = "<!-- pictures: written by benchmarks/zoo/zoo_table.py -->", "<!-- pictures: end -->"
PICTURES = "pictures/"
PLAIN = {"types": "16 or 32 bits", "packing": "yes", "lora": "yes", "tiles": "yes"}
PART = re.compile(r"\w+(\.\w+)+")


def rows_of(records: dict[str, Any]) -> dict[str, Any]:
    """What people are told, by architecture, and the versions it was tried with."""
    versions = sorted({record["key"].partition(", code")[0] for record in records.values()})
    return {"tried_with": "; ".join(versions), "architectures": {name: row(r) for name, r in sorted(records.items())}}


def row(record: dict[str, Any]) -> dict[str, str]:
    """One architecture: `streams` yes or no, and either why not, or what goes with it."""
    if why := record.get("unbuilt"):
        return {"streams": "not tried", "why": why}
    if why := record["streams"]:
        return {"streams": "no", "why": why}
    found = {
        "streams": "yes",
        "types": "16 or 32 bits",
        "packing": {"position_ids": "yes", "mask_4d": "by masks", "mask_map": "by masks"}.get(record["packing"], "no"),
        "lora": "yes" if not record["lora"] else f"no: {_first(record['lora'])}",
        "tiles": "yes" if not record["tiles"] else f"no: {_part(record['tiles'])}",
        "equal": "yes" if not record["steps"] and not record["export"].startswith("WRONG") else "no",
    }
    if record["bf16"]:
        found["types"] = "32 bits"
    elif record["bf16_trained"]:
        found["types"] = "32 bits; from scratch 16, too"
    if record.get("routers"):
        found["routers"] = record["routers"]
    return found


def pictures(records: dict[str, Any]) -> str:
    """The table of image-text architectures between its marks in docs/models.md."""
    found = {n.removeprefix(PICTURES): r for n, r in sorted(records.items()) if n.startswith(PICTURES)}
    equal = [name for name, r in found.items() if r.get("streams") == "" and not r["steps"] and not r["answer"]]
    others = [name for name, r in found.items() if name not in equal and r["unbuilt"]]  # KeyError: a wrong one
    versions = sorted({r["key"].partition(", code")[0] for r in found.values()})
    lines = [
        SEEN,
        f"Tried with {'; '.join(versions)}: {len(found)} image-text architectures, of which {len(equal)} train and "
        "answer as the plain model does:",
        "",
        ", ".join(equal) + ".",
        "",
        f"The other {len(others)} were not tried, because the trial could not build a small copy with a batch. That "
        "says nothing of the model. [The raw results](../benchmarks/results/architectures.json) have the reasons:",
        "",
        ", ".join(others) + ".",
        SEEN_END,
    ]
    return "\n".join(lines)


def _first(text: str) -> str:
    return text.strip().splitlines()[0]


def _part(text: str) -> str:
    """Whichever parameter a refusal of tiles names, without its layer; else all of its words."""
    if text.startswith("its head"):
        return "its head"
    found = PART.search(_first(text))
    return "`" + re.sub(r"^.*\.\d+\.", "", found[0]) + "`" if found else _first(text)


def markdown(rows: dict[str, Any]) -> str:
    """The tables between the marks in docs/models.md."""
    found = rows["architectures"]
    streamed = {name: r for name, r in found.items() if r["streams"] == "yes"}
    refused = {name: r for name, r in found.items() if r["streams"] == "no"}
    untried = [name for name, r in found.items() if r["streams"] == "not tried"]
    plain = [name for name, r in streamed.items() if all(r[column] == said for column, said in PLAIN.items())]
    lines = [
        BEGIN,
        f"Tried with {rows['tried_with']}: {len(found)} architectures, {len(streamed)} stream, {len(refused)} go to "
        f"DeepSpeed's engine, {len(untried)} could not be tried.",
        "",
        f"{len(plain)} stream in 16 and in 32 bits, with packed rows, LoRA and tiles:",
        "",
        ", ".join(plain) + ".",
        "",
        f"The other {len(streamed) - len(plain)} stream with these limits:",
        "",
        "| architecture | weights in | packed rows | LoRA | in tiles |",
        "|---|---|---|---|---|",
        *(
            f"| {n} | {r['types']} | {r['packing']} | {r['lora']} | {r['tiles']} |"
            for n, r in streamed.items()
            if n not in plain
        ),
        "",
        "| goes to DeepSpeed | why it is not streamed |",
        "|---|---|",
        *(f"| {name} | {r['why'].replace('|', '/')} |" for name, r in refused.items()),
        "",
        "transformers did not build a small copy of these, so they could not be tried (`outcore models NAME` has the "
        f"reason): {', '.join(untried)}.",
        END,
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Write both, or look whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    records = json.loads(RESULTS.read_text())
    rows = rows_of({name: record for name, record in records.items() if not name.startswith(PICTURES)})
    docs = text = DOCS.read_text()
    for begin, end, table in ((BEGIN, END, markdown(rows)), (SEEN, SEEN_END, pictures(records))):
        before, _, rest = docs.partition(begin)
        docs = before + table + rest.partition(end)[2]
    packaged = json.dumps(rows, indent=0, ensure_ascii=False) + "\n"
    if args.check:
        return int(docs != text or not PACKAGED.exists() or packaged != PACKAGED.read_text())
    DOCS.write_text(docs)
    PACKAGED.write_text(packaged)
    return 0


if __name__ == "__main__":
    sys.exit(main())
