"""Keys are guessed slowly, and nothing tells a right one from a wrong one before its time."""

import asyncio
import json
import stat
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI

from outcore.common.files import opener_for_us
from outcore.serve.additions import ApiError, Keys
from outcore.serve.gate import keys as keys_module
from outcore.serve.stopping import Server
from outcore.serve.watch import Records

HERE, THERE = {"client": ("10.0.0.5", 1)}, {"client": ("10.0.0.6", 1)}
RIGHT = b"the-right-key-\xc3\xa9"


@pytest.fixture
def keys(monkeypatch):
    monkeypatch.setattr(keys_module, "GUESS_S", 0.1)
    monkeypatch.setattr(keys_module, "MOST_WAIT_S", 0.55)
    return Keys(("another-key", RIGHT.decode()))


async def tried(keys: Keys, given: bytes, scope: dict) -> tuple[int, float]:
    """(status, seconds)."""
    began_s = time.monotonic()
    try:
        await keys.check(given, scope)
        status = 200
    except ApiError as error:
        status = error.status
    return status, time.monotonic() - began_s


def test_guesses_of_an_address_take_turns_and_the_right_key_waits_as_they_do(keys):
    async def guess():
        many = [b"wrong"] * 30
        many[7] = many[12] = RIGHT  # in its turn, and too late among those before it
        return await asyncio.gather(*(tried(keys, key, HERE) for key in many), tried(keys, RIGHT, THERE))

    *guesses, other = asyncio.run(guess())
    assert [status for status, _ in guesses] == [401] * 7 + [200] + [401] * 2 + [429] * 20
    assert guesses[7][1] > 0.25, "as long as a wrong one there"
    assert max(seconds for _, seconds in guesses[:5]) < 0.1 and 0.45 < guesses[9][1] < 1
    assert other[0] == 200 and other[1] < 0.1, "another address"
    assert asyncio.run(tried(keys, b"", HERE))[0] == 401, "no key is no guess"


def test_who_has_the_right_key_waits_its_turn_and_then_no_more(keys):
    async def guess():
        await asyncio.gather(*(tried(keys, b"wrong", HERE) for _ in range(7)))
        return [await tried(keys, RIGHT, HERE) for _ in range(3)]

    first, second, third = asyncio.run(guess())
    assert first[0] == second[0] == third[0] == 200 and second[1] < 0.2 and third[1] < 0.05


@pytest.mark.usefixtures("one_thread")
def test_what_clients_said_is_for_this_user_alone(server):
    logs = server.service.settings.logs
    assert stat.S_IMODE(server.service.records.path.stat().st_mode) == 0o600
    assert [stat.S_IMODE((logs / name).stat().st_mode) for name in ("files", "batches")] == [0o700] * 2


def test_records_of_models_opened_in_one_second_are_files_apart_and_old_ones_are_shut(tmp_path):
    old = tmp_path / "requests-20200101-000000.jsonl"
    old.write_text("{}")
    old.chmod(0o644)
    made = [Records(tmp_path, {"model_hash": name}, with_text=False) for name in "abc"]
    for number, records in enumerate(made):
        records.write({"by": number})
        records.close()
    kept = [[json.loads(line) for line in records.path.read_text().splitlines()] for records in made]
    assert [[line.get("by") for line in lines] for lines in kept] == [[None, 0], [None, 1], [None, 2]]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("requests-*")} == {0o600}
    old.chmod(0o644)
    with open(old, "ab", opener=opener_for_us):
        assert stat.S_IMODE(old.stat().st_mode) == 0o600


def test_an_old_record_that_goes_meanwhile_stops_no_opening_and_what_a_link_names_stays_as_it_is(tmp_path):
    (tmp_path / "logs").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("{}")
    elsewhere.chmod(0o644)
    for name, there in (("gone", "nowhere"), ("link", "elsewhere")):  # a broken link: listed, and not there
        (tmp_path / f"logs/requests-{name}.jsonl").symlink_to(tmp_path / there)
    chmod = Path.chmod

    def vanished(path, mode):
        if path.name == "requests-old.jsonl":
            raise FileNotFoundError(path)
        chmod(path, mode)

    (tmp_path / "logs/requests-old.jsonl").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "chmod", vanished)
        Records(tmp_path / "logs", {"model_hash": "a"}, with_text=False).close()
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o644


def test_no_header_chooses_the_address_that_guesses_are_counted_by():
    assert not Server(FastAPI()).config.proxy_headers
