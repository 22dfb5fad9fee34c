"""The house as the code has it: every import between rooms, read from the source (also inside functions).

    python -m tests.house          prints rooms, floors, arrows, and what breaks the rules

A *room* is a folder of `outcore/`, a *sub-room* a folder inside one (`outcore.flow.weights`). `FLOORS` says what stands
on what: a room may import from lower floors only, and from neighbours on the same floor only where `ARROWS` says so.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        ("train", "infer"),
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
    "apart": 716,
    "api": 892,
    "checkpoint": 2066,
    "cli": 97,
    "common": 1349,
    "config": 3022,
    "data": 6610,
    "engine.base": 282,
    "engine.decide": 162,
    "engine.deepspeed": 3979,
    "engine.stream": 6144,
    "evaluate": 2689,
    "flow": 8008,
    "formats": 2642,
    "hf": 2195,
    "infer": 12475,
    "install": 2589,
    "integrations": 45,
    "machine": 2002,
    "model": 6241,
    "monitor": 2990,
    "optim": 3049,
    "performance": 1173,
    "plan": 5771,
    "probe": 4359,
    "runs": 628,
    "serve": 5403,
    "sizing": 3734,
    "staging": 3381,
    "states": 1512,
    "storage": 2885,
    "train": 4721,
    "ui": 4700,
}
"""Lines that a room may have: a number here only falls. Who needs more takes as much out of the room first."""

JOURNEYS = {
    "command line to an engine that is built": 9,
    "a weight from RAM to the GPU": 9,
    "a request to its first token": 11,
    "a row to its labels": 10,
}
"""Files that one opens on the way, which docs/architecture.md lists: a number here only falls."""
SETTINGS = {
    "gradient_accumulation_steps": 22,
    "weight_decay": 19,
    "tile_bytes": 15,
    "resident_gib": 5,
    "lane_slots": 4,
}
"""Files of the package that name a setting: what one reads to change it. A number here only falls."""
MOST_PARAMETERS, MOST_METHODS = 8, 15
MANY_PARAMETERS = frozenset(
    {
        "checkpoint/folders.py:save_checkpoint",
        "engine/deepspeed/infinity.py:build_infinity_config",
        "engine/deepspeed/staged/states.py:__init__",
        "infer/opening/weights.py:open_weights",
        "infer/passes/graphs.py:__init__",
        "plan/inference/words.py:plan_inference",
    }
)
"""Functions with more parameters, from before the rule. Kernels for GPUs are not counted."""
MANY_METHODS = frozenset(
    {
        "api/llm.py:LLM",
        "config/resolver.py:_Resolver",
        "data/cache/encode.py:DocumentEncoder",
        "data/chat/template.py:ChatTemplate",
        "data/layout/mixture.py:MixedRows",
        "engine/deepspeed/engine.py:DeepSpeedEngine",
        "engine/deepspeed/staged/gradients.py:StagedGradients",
        "engine/deepspeed/staged/optimizer.py:HousedZero3",
        "engine/deepspeed/staged/params.py:StagedParams",
        "engine/deepspeed/staged/states.py:ShareStates",
        "engine/stream/engine.py:StreamEngine",
        "engine/stream/gradients/download.py:GradientDownload",
        "engine/stream/gradients/tiles.py:TileGradients",
        "engine/stream/residents.py:Residents",
        "engine/stream/updates.py:PartUpdates",
        "evaluate/http/routes.py:Evaluations",
        "flow/layers/long_rows.py:LongRows",
        "flow/weights/homes.py:WeightHomes",
        "hf/stack.py:LayerStack",
        "infer/attention/paged.py:PagedAttention",
        "infer/cache/drive.py:DriveStore",
        "infer/cache/kept.py:KeptPrefixes",
        "infer/cache/kv_cache.py:KvCache",
        "infer/engine.py:InferenceEngine",
        "infer/opening/arrival.py:ResidentWeights",
        "install/job.py:InstallJob",
        "monitor/metrics/log.py:MetricsLog",
        "monitor/screen/progress.py:RunProgress",
        "optim/pool.py:OptimizerPool",
        "plan/hardware.py:Hardware",
        "plan/record.py:Plan",
        "serve/jobs/batches.py:Batches",
        "serve/service.py:Service",
        "sizing/training/placement.py:TrainingPlacement",
        "staging/lanes/driver.py:LaneDriver",
        "staging/lanes/lane.py:Lane",
        "staging/lanes/transfer.py:LaneTransfer",
        "staging/pool/pool.py:PinnedPool",
        "staging/shared/board.py:RankGroup",
        "states/homes.py:Homes",
        "states/ring/ring.py:StateRing",
        "states/ring/schedule.py:RingSchedule",
        "storage/block_file.py:BlockFile",
        "storage/store/digests.py:BlockDigests",
        "storage/store/tensor_store.py:TensorStore",
        "storage/windows_file.py:WindowsFile",
        "ui/api/conversations.py:Conversations",
        "ui/api/model.py:ModelHost",
        "ui/api/runs.py:Runs",
        "ui/panels/chat.py:ChatPanel",
    }
)
"""Classes with more methods, from before the rule."""


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


def with_many_parameters() -> set[str]:
    """Functions with more than `MOST_PARAMETERS`, `self` not counted, as file:name."""
    found = set()
    for path, node in _defined(ast.FunctionDef, ast.AsyncFunctionDef):
        given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        is_kernel = any("triton" in ast.unparse(one) for one in node.decorator_list)
        if not is_kernel and sum(one.arg not in ("self", "cls") for one in given) > MOST_PARAMETERS:
            found.add(f"{path}:{node.name}")
    return found


def with_many_methods() -> set[str]:
    """Classes with more than `MOST_METHODS`, properties counted and protocols not, as file:name."""
    found = set()
    for path, node in _defined(ast.ClassDef):
        is_protocol = any("Protocol" in ast.unparse(base) for base in node.bases)
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        if not is_protocol and len(methods) > MOST_METHODS:
            found.add(f"{path}:{node.name}")
    return found


def _defined(*kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                yield path.relative_to(PACKAGE).as_posix(), node


def journeys(page: str) -> dict[str, list[Path]]:
    """Files of each journey in docs/architecture.md."""
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+\.py`) \|$", page, re.MULTILINE)
    return {name: [PACKAGE / file for file in re.findall(r"`([^`]+)`", files)] for name, files in rows}


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
