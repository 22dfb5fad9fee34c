"""The tables of docs/data.md, made from the code: `python -m tests.data.tables` writes them."""

import re
from pathlib import Path

from outcore.data.chat import ChatEncoder
from outcore.data.rows import KINDS
from tests.data.families import FAMILIES, tokenizer_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def shapes() -> str:
    """A line for every shape of rows."""
    lines = ["| shape | known by | no loss on | loss on | also read |", "|---|---|---|---|---|"]
    for kind in KINDS.values():
        extras = ", ".join(f"`{name}`" for name in kind.extras) or "–"
        lines.append(f"| {kind.name} | {kind.known_by} | {kind.asked} | {kind.loss} | {extras} |")
    return "\n".join(lines)


def templates() -> str:
    """A line for every published template in the tests' data."""
    lines = ["| template of | loss begins behind | a turn ends with | cannot take |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        said = ChatEncoder(tokenizer_of(name)).describe()[0]
        begin = re.search(r"begins with '(.*?)' \(no loss\)", said)
        end = re.search(r"its end '(.*?)'", said)
        cannot = said.partition("; it cannot take ")[2] or "–"
        cells = (f"`{found[1]}`" if found and found[1] else "–" for found in (begin, end))
        lines.append(
            f"| {family.source} | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} | {cannot} |"
        )
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The page with its tables as the code has them."""
    for name, table in (("shapes", shapes()), ("templates", templates())):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
