"""The house as the code has it: every import between rooms, read from the source (also inside functions).

    python -m tests.house          prints rooms, floors, arrows, and what breaks the rules

A *room* is a folder of `outcore/`, a *sub-room* a folder inside one (`outcore.flow.weights`). `FLOORS` says what stands
on what: a room may import from lower floors only, and from neighbours on the same floor only where `ARROWS` says so.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "outcore"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("common",),
    ("machine", "model", "optim", "storage", "sizing", "config"),
    ("staging", "data", "formats"),
    ("checkpoint", "apart"),
    ("flow", "runs"),
    ("states",),
    ("engine.base", "engine.stream", "engine.deepspeed", "engine.decide", "hf"),
    ("plan", "monitor"),
    ("train", "performance", "infer", "serve", "integrations"),
    ("evaluate", "ui"),
    ("api",),
    ("cli",),
    ("__main__",),
)
"""From the ground up."""
ARROWS = frozenset(
    {
        ("config", "sizing"),
        ("model", "sizing"),
        ("optim", "sizing"),
        ("optim", "machine"),
        ("engine.stream", "engine.base"),
        ("engine.deepspeed", "engine.base"),
        ("engine.decide", "engine.base"),
        ("engine.decide", "engine.stream"),
        ("engine.decide", "engine.deepspeed"),
        ("performance", "train"),
        ("serve", "infer"),
        ("ui", "evaluate"),
    }
)
"""(from, to) between rooms of one floor."""
BESIDE = {"install": 3, "probe": 3}
"""Rooms beside the tower: they import from floors up to this one, and no room of the tower imports them."""
OPEN = ("common", "sizing", "engine.base", "engine.decide", "api")
"""Rooms whose files are their doors: each is one noun (`common.quantities`, `sizing.tiles`), imported by its name."""
DOORED = (
    *("model", "config", "checkpoint", "data", "runs", "evaluate", "hf"),
    *("flow", "formats", "infer", "serve", "states", "sizing"),
)
"""Rooms whose files are imported from outside through an `__init__` only."""

LINES = {
    "apart": 400,
    "api": 950,
    "checkpoint": 1850,
    "cli": 150,
    "common": 1290,
    "config": 2900,
    "data": 6000,
    "engine.base": 350,
    "engine.decide": 200,
    "engine.deepspeed": 4300,
    "engine.stream": 6300,
    "evaluate": 2900,
    "flow": 8450,
    "formats": 2700,
    "hf": 1650,
    "infer": 11200,
    "install": 2850,
    "integrations": 100,
    "machine": 2100,
    "model": 6000,
    "monitor": 3200,
    "optim": 3100,
    "performance": 1200,
    "plan": 6200,
    "probe": 4550,
    "runs": 700,
    "serve": 4750,
    "sizing": 3800,
    "staging": 3500,
    "states": 1600,
    "storage": 2930,
    "train": 2250,
    "ui": 4700,
}
"""Lines that a room may have: a number here only falls. Who needs more takes as much out of the room first."""


@dataclass(frozen=True)
class Import:
    """One file imports another."""

    importer: str
    imported: str
    """Dotted name of a module; a package's door is the package."""
    names: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"{self.importer} -> {self.imported} ({', '.join(self.names)})"


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package; a package under its own name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(path: Path) -> Iterator[ast.AST]:
    """The module of a file and every statement in it, also inside functions; what expressions are made of is not
    looked at: most of a file."""
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            left.extend(getattr(node, block, ()))


def imports(known: Mapping[str, Path]) -> list[Import]:
    """Every import of one module of the package by another, wherever in the file it stands."""
    found = []
    for name, path in known.items():
        for node in statements(path):
            for target, names in _targets(node, known):
                if target != name:
                    found.append(Import(name, target, names))
    return found


def _targets(node: ast.AST, known: Mapping[str, Path]) -> Iterable[tuple[str, tuple[str, ...]]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, ()) for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom) and node.level:
        yield f"relative import of {node.module}", ()
    elif isinstance(node, ast.ImportFrom) and node.module in known:
        files = [alias.name for alias in node.names if f"{node.module}.{alias.name}" in known]
        yield from ((f"{node.module}.{name}", (name,)) for name in files)
        if rest := tuple(alias.name for alias in node.names if alias.name not in files):
            yield node.module, rest


def room_of(module: str) -> str:
    """Room of a module; '' for the package's own `__init__`."""
    parts = module.split(".")[1:]
    if parts[:1] == ["engine"] and len(parts) > 1:
        return ".".join(parts[:2])
    return parts[0] if parts else ""


def floor_of(room: str) -> int:
    """Number of a room's floor, 0 the ground; of a room beside the tower the highest that it may use."""
    for number, rooms in enumerate(FLOORS):
        if room in rooms:
            return number
    return BESIDE[room]


def upward(found: Iterable[Import]) -> list[Import]:
    """Imports from a floor above, from a neighbour without an arrow, or of a room beside the tower."""
    wrong = []
    for one in found:
        importer, imported = room_of(one.importer), room_of(one.imported)
        if importer == imported or "" in (importer, imported) or importer == "cli" or (importer, imported) in ARROWS:
            continue
        limit = floor_of(importer) if importer in BESIDE else floor_of(importer) - 1
        if imported in BESIDE or floor_of(imported) > limit:
            wrong.append(one)
    return wrong


def past_doors(found: Iterable[Import], known: Mapping[str, Path]) -> list[Import]:
    """Imports of a file of another room, or of another sub-room of a doored room, instead of its `__init__`."""
    return [one for one in found if _is_past_door(one, known)]


def _is_past_door(one: Import, known: Mapping[str, Path]) -> bool:
    is_file = known[one.imported].name != "__init__.py"
    importer, imported = room_of(one.importer), room_of(one.imported)
    home, room = one.imported.rpartition(".")[0], f"outcore.{imported}"
    if not is_file or imported in ("", "cli") or (imported in OPEN and home in (room, "outcore.engine")):
        return False
    if importer != imported:
        return True
    return imported in DOORED and home != room and not f"{one.importer}.".startswith(f"{home}.")


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected parts of more than one member (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in number:
            visit(node)
    return found


def file_edges(found: Iterable[Import]) -> dict[str, set[str]]:
    """Module -> modules that it imports. A package's `__init__` counts as itself, so circles through doors show; but
    for the face, whose names open their rooms only when they are asked for."""
    edges: dict[str, set[str]] = {}
    for one in (one for one in found if one.importer != "outcore"):
        edges.setdefault(one.importer, set()).add(one.imported)
    return edges


def sub_room_edges(found: Iterable[Import], known: Mapping[str, Path]) -> dict[str, set[str]]:
    """Arrows between sub-rooms, whose files count as one; a file at a room's root, and a room's door, stand for
    themselves. So two sub-rooms that need each other show, also where that goes through a file beside them."""

    def node(module: str) -> str:
        parent = module.rpartition(".")[0]
        if known[module].name == "__init__.py" or module == f"outcore.{room_of(module)}":
            return module  # a door, or a room of one file
        return module if parent == f"outcore.{room_of(module)}" else parent

    edges: dict[str, set[str]] = {}
    for one in (one for one in found if one.importer != "outcore"):
        if node(one.importer) != node(one.imported):
            edges.setdefault(node(one.importer), set()).add(node(one.imported))
    return edges


def crowded(limit: int = 15) -> list[str]:
    """Folders of the package, tests and benchmarks with more than `limit` source files side by side."""
    found = []
    for top in ("outcore", "tests", "benchmarks"):
        for folder in [ROOT / top, *(p for p in (ROOT / top).rglob("*") if p.is_dir() and p.name != "__pycache__")]:
            files = [p for p in folder.iterdir() if p.suffix in (".py", ".cpp", ".h")]
            if len(files) > limit:
                found.append(f"{folder.relative_to(ROOT)}: {len(files)}")
    return found


def lines_of_rooms(known: Mapping[str, Path]) -> dict[str, int]:
    """Lines of each room's Python."""
    lines: dict[str, int] = {}
    for name, path in known.items():
        lines[room_of(name)] = lines.get(room_of(name), 0) + len(path.read_text(encoding="utf-8").splitlines())
    return lines


def main() -> None:
    known = modules()
    found = imports(known)
    rooms: dict[str, set[str]] = {}
    for one in found:
        importer, imported = room_of(one.importer), room_of(one.imported)
        if importer != imported and imported:
            rooms.setdefault(importer, set()).add(imported)
    lines = lines_of_rooms(known)
    for number, names in reversed(list(enumerate(FLOORS))):
        for name in names:
            print(f"{number} {name:17} {lines.get(name, 0):6} lines  <- {' '.join(sorted(rooms.get(name, ())))}")
    for name in BESIDE:
        print(f"- {name:17} {lines.get(name, 0):6} lines  <- {' '.join(sorted(rooms.get(name, ())))}")
    for title, rows in (
        ("upward", [one.words for one in upward(found)]),
        ("circles of files", [" ".join(group) for group in circles(file_edges(found))]),
        ("circles of sub-rooms", [" ".join(group) for group in circles(sub_room_edges(found, known))]),
        ("more than 15 files", crowded()),
        ("past doors", [one.words for one in past_doors(found, known)]),
    ):
        print(f"\n{title}: {len(rows)}")
        print("\n".join(f"  {row}" for row in rows))


if __name__ == "__main__":
    main()
