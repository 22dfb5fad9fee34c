"""The house stays as it is drawn: floors, no circles, doors, levels of few files. `python -m tests.house` shows it."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests import house

KNOWN = house.modules()
MAX_DOOR_NAMES = 20
WIDE_DOORS = {"outcore.optim"}
"""Doors from before the rule, with more names."""
TORCH_FREE = ("common", "config", "machine", "sizing", "install")


@pytest.fixture(scope="module")
def found() -> list[house.Import]:
    """Every import; read when a test asks, since each process of a run collects this file."""
    return house.imports(KNOWN)


def test_every_room_stands_on_a_floor():
    rooms = {house.room_of(module) for module in KNOWN} - {"", "engine"}
    drawn = {room for floor in house.FLOORS for room in floor} | set(house.BESIDE)
    assert not rooms - drawn, "draw it in tests/house.py"


def test_nothing_is_imported_from_above(found):
    assert not [one.words for one in house.upward(found)]


def test_the_engines_do_not_know_each_other_and_flow_knows_nobody_above(found):
    arrows = {(house.room_of(one.importer), house.room_of(one.imported)) for one in found}
    assert not arrows & {("engine.stream", "engine.deepspeed"), ("engine.deepspeed", "engine.stream")}
    assert not {there for here, there in arrows if here == "flow"} & {"states", "plan", "train", "infer"}


def test_there_are_no_circles(found):
    assert not house.circles(house.file_edges(found))
    assert not house.circles(house.sub_room_edges(found, KNOWN))


def test_a_circle_or_an_import_upward_would_show():
    wrong = house.Import("outcore.flow.flow", "outcore.states", ("Homes",))
    assert house.upward([wrong]) == [wrong]
    loop = [("outcore.flow.parts.a", "outcore.flow.tiles.b"), ("outcore.flow.tiles.c", "outcore.flow.parts.d")]
    known = {module: Path(f"{module}.py") for pair in loop for module in pair}
    edges = house.sub_room_edges([house.Import(*pair, ()) for pair in loop], known)
    assert house.circles(edges) == [["outcore.flow.parts", "outcore.flow.tiles"]]


def test_rooms_are_imported_through_their_doors(found):
    past = [one.words for one in house.past_doors(found, KNOWN)]
    assert not past, "import these from the room's __init__, or from a sub-room's"


@pytest.mark.parametrize("module", [name for name, path in KNOWN.items() if path.name == "__init__.py"])
def test_a_door_names_few_things(module):
    nodes = ast.walk(ast.parse(KNOWN[module].read_text(encoding="utf-8")))
    names = [alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert len([name for name in names if name != "annotations"]) <= MAX_DOOR_NAMES or module in WIDE_DOORS


def test_no_room_grows():
    lines = house.lines_of_rooms(KNOWN)
    grown = {room: count for room, count in lines.items() if room in house.LINES and count > house.LINES[room]}
    assert not grown, "take as much out of the room; its budget in tests/house.py only falls"
    assert set(house.LINES) == set(lines) - {"", "engine", "__main__"}


def test_no_function_gets_more_parameters_and_no_class_more_methods():
    assert house.with_many_parameters() == house.MANY_PARAMETERS, "give it a settings object; take off what is mended"
    assert house.with_many_methods() == house.MANY_METHODS, "take a class out of it; take off what is mended"


def test_journeys_get_no_longer():
    """Every file on the way is there, and one before it names something that it defines."""
    found = house.journeys((house.ROOT / "docs/architecture.md").read_text("utf-8"))
    assert {name: len(files) for name, files in found.items()} == house.JOURNEYS
    for files in found.values():
        said = files[0].read_text("utf-8")
        for file in files[1:]:
            source = file.read_text("utf-8")
            named = re.findall(r"^(?:def|class) (\w+)|^    def (\w+)", source, re.MULTILINE)
            assert any(re.search(rf"\b{a or b}\b", said) for a, b in named), file
            said += source


def test_a_setting_stands_in_no_more_files():
    texts = [path.read_text(encoding="utf-8") for path in KNOWN.values()]
    files = {name: sum(bool(re.search(rf"\b{name}\b", text)) for text in texts) for name in house.SETTINGS}
    assert not {name: count for name, count in files.items() if count > house.SETTINGS[name]}


def test_levels_are_not_crowded():
    assert not house.crowded()


def test_no_prefix_is_a_folder_in_disguise():
    for folder in {path.parent for path in KNOWN.values()}:
        first_words = Counter(path.stem.split("_")[0] for path in folder.glob("*.py") if "_" in path.stem.strip("_"))
        beside = {path.name for path in folder.iterdir() if path.is_dir()}
        assert not [word for word, count in first_words.items() if count > 2 or word in beside], folder


def test_a_class_name_is_unique():
    names = Counter(
        node.name
        for path in KNOWN.values()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]


def test_product_code_imports_no_test():
    imported = re.compile(r"^\s*(?:from|import)\s+tests\b", re.MULTILINE)
    assert not [module for module, path in KNOWN.items() if imported.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("room", TORCH_FREE)
def test_rooms_that_need_no_torch_import_none(room):
    imported = re.compile(r"^(?:from|import)\s+(?:torch|transformers)\b", re.MULTILINE)  # at import; a function may
    inside = [path for module, path in KNOWN.items() if house.room_of(module) == room]
    assert inside and not [path for path in inside if imported.search(path.read_text(encoding="utf-8"))]


def pages() -> str:
    return "".join((house.ROOT / page).read_text("utf-8") for page in ("CONTRIBUTING.md", "docs/architecture.md"))


def test_contributing_and_architecture_name_files_that_are_there():
    named = set(re.findall(r"`([a-z_/]+(?:/|\.py|\.md))", pages()))
    tops = (house.ROOT, house.PACKAGE, house.PACKAGE / "engine/stream", house.PACKAGE / "flow/layers")
    assert len(named) > 40
    assert not [name for name in named if not any((top / name).exists() for top in tops)]


def test_contributing_and_architecture_name_functions_that_are_there():
    named = re.findall(r"`([a-z_/0-9]+\.py):(\w+)`", pages())
    assert {"_issue", "_settle", "_clip_factor", "packed_size"} <= {name for _, name in named}
    for file, name in named:
        source = (house.PACKAGE / file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(def|class) {name}\b|^{name}\b.*=", source, re.MULTILINE), (file, name)
