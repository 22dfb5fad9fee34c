"""docs/first_notebook.md as a notebook: prose, `bash` blocks as `!command` cells, `python` blocks as code.

python -m tests.docs.notebook        writes examples/first_run.ipynb"""

import json
import re

from tests.forked import ROOT

RECIPE = ROOT / "docs" / "first_notebook.md"
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


def cells() -> list[dict]:
    """Cells of the notebook, in nbformat's form."""
    found, parts = [], re.split(r"^```(\w+)\n(.*?)^```\n", RECIPE.read_text(), flags=re.M | re.S)
    for prose, language, block in zip(parts[::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True):
        if language == "bash":
            block = "".join(f"!{line}" for line in block.splitlines(keepends=True))
        for kind, text in (("markdown", prose.strip()), ("code", block.strip())):
            cell = {
                "cell_type": kind,
                "id": f"cell{len(found)}",
                "metadata": {},
                "source": text.splitlines(keepends=True),
            }
            if text:
                found.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    return found


def notebook() -> str:
    """The whole file."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells(), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook())
