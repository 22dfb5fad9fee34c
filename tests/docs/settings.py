"""docs/settings.md, made from the table of settings: `python -m tests.docs.settings` writes it."""

from itertools import groupby

from outcore.config import FIELDS
from outcore.config.spec import Field
from tests.forked import ROOT

PAGE = ROOT / "docs/settings.md"
HEAD = """# Settings

Each is a flag (`--name value`) and a line of YAML (`name: value`); flags win. Where a key of `deepspeed_config.json`
means the same, it stands last. A default of "–" is derived from the machine and the model; the run prints what was
chosen, and why.
"""


def page() -> str:
    """The whole page."""
    text = HEAD
    for group, rows in groupby(FIELDS.values(), key=lambda row: row.group):
        text += f"\n## {group}\n\n| setting | default | what it does | other names | key |\n|---|---|---|---|---|\n"
        text += "".join(f"| {' | '.join(cells(row))} |\n" for row in rows)
    return text


def cells(row: Field) -> tuple[str, ...]:
    """One line of the table."""
    default = " ".join(row.default) if isinstance(row.default, tuple) else row.default
    shown = "–" if default is None else f"`{str(default).lower() if row.is_switch else default}`"
    values = f" One of {', '.join(row.choices)}." if row.choices else ""
    words = (row.help + values).replace("|", "\\|").replace("<", "&lt;")
    return f"`{row.name}`", shown, words, ", ".join(row.spec.aliases), ", ".join(row.spec.file)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
