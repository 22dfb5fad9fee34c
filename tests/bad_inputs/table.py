"""The table of all cases, docs/bad_inputs.md: `python -m tests.bad_inputs.table --write` runs them and writes it.

`--show ID...` prints the whole output of some.
"""

import re
import sys
import tempfile
from pathlib import Path

from tests.bad_inputs.cases import CASES
from tests.bad_inputs.world import LEAVES, REPOSITORY, Case, NotHere, Outcome, Shared, run_case

TABLE = REPOSITORY / "docs/bad_inputs.md"
LONGEST = 420


def cell(case: Case, message: str) -> str:
    """The message as one table cell, abbreviated where nothing that matters is lost."""
    text = re.sub(r"\s+", " ", message).strip()
    if len(text) > LONGEST:
        cut = text[:LONGEST].rsplit(" ", 1)[0]
        if all(word in cut for word in case.words):
            text = cut + " …"
    return escaped(text)


def escaped(text: str) -> str:
    """Text that Markdown shows as it stands."""
    for mark in ("\\", "|", "*", "_", "<"):
        text = text.replace(mark, "\\" + mark)
    return text


def row_of(case: Case, outcome: Outcome) -> str:
    """One line of the table."""
    command = case.command.replace("|", "\\|")
    message = cell(case, outcome.message)
    return f"| {case.id} | {case.wrong} | `{command}` | {message} | {case.code} | {LEAVES[case.leaves][0]} |"


HEAD = """# Bad inputs, and what you read

Each line is something that people get wrong, what they typed, and what the program answers. Every line is a test:
`tests/bad_inputs` runs it, checks the exit code, the words and the files on disk, and that this table says the same.
Written by `python -m tests.bad_inputs.table --write`; `…` marks what is left out. DIR, DATA, MODEL, RUN and LAST stand
for folders: LAST is a copy of the newest checkpoint of RUN, which the case damages; DATA has a space in its name, so
every run here also shows that such paths work. The lines run with `--engine deepspeed` where they do not say otherwise;
configuration, data, model and checkpoints are read by the same code for both engines. Cases that mount a small or
read-only drive are skipped where mounting is not permitted.

Exit codes of `train_model.py`, and of `outcore`'s commands where they do not say otherwise: 0 done, 1 the run
failed, 2 wrong input, 128 + signal when stopped and saved.

| id | what is wrong | the command or setting | what you read | exit code | on the disk afterwards |
|---|---|---|---|---|---|
"""


def outcomes(ids: list[str]) -> dict[str, Outcome]:
    """The outcome of each case, in order."""
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="bad inputs ") as root:
        (Path(root) / "shared").mkdir()
        shared = Shared(Path(root) / "shared")
        for case in CASES:
            if ids and case.id not in ids:
                continue
            here = Path(root) / case.id
            here.mkdir()
            try:
                found[case.id] = run_case(case, here, shared)
            except NotHere as reason:
                sys.exit(f"{case.id}: {reason}: the table has to be written on a machine that can run every case")
            except AssertionError as problem:
                print(problem, file=sys.stderr)
                continue
            got = found[case.id]
            missing = [word for word in case.words if word not in got.message]
            if got.code != case.code or missing or "Traceback" in got.printed:
                del found[case.id]
                print(f"--- {case.id}: exit code {got.code} (wanted {case.code}), lacks {missing}\n{got.printed}",
                      file=sys.stderr)  # fmt: skip
    return found


def main(argv: list[str]) -> int:
    """--write: run every case and write the table. --show ID ...: print what the program says."""
    if argv[:1] == ["--show"]:
        for id_, outcome in outcomes(argv[1:]).items():
            print(f"=== {id_}: exit code {outcome.code}\n{outcome.message}\n")
        return 0
    if argv != ["--write"]:
        print(__doc__)
        return 2
    found = outcomes([])
    missing = [case.id for case in CASES if case.id not in found]
    if missing:
        print(f"not written: {', '.join(missing)} did not go as expected", file=sys.stderr)
        return 1
    TABLE.write_text(HEAD + "".join(row_of(case, found[case.id]) + "\n" for case in CASES), encoding="utf-8")
    print(f"{len(found)} cases: {TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
