"""Several models and adapters behind one address: by name, opened when they are asked for, closed when nobody asks."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading

import pytest

from outcore.infer.opening import OpenedModel
from outcore.serve import ServeSettings, app
from outcore.serve.errors import ApiError
from outcore.serve.models import Base, Models
from outcore.serve.service import Service
from outcore.sizing.inference import DoesNotFit
from tests.infer.models import save_tiny_model
from tests.infer.parts.test_adapters import save_adapter
from tests.serve.running import Running, get, send
from tests.waiting import until

pytest.importorskip("fastapi")
pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, an adapter over it, another model with an adapter over that."""
    root = tmp_path_factory.mktemp("models")
    for name, fields in (("a", {}), ("b", {"seed": 5, "hidden_size": 128})):
        model, _ = save_tiny_model(root / name, **fields)
        model.config._name_or_path = model.name_or_path = str(root / name)
        save_adapter(model, root / f"{name}-adapter", seed=7)
    return root


def asked(server, name, path="/v1/chat/completions", **more):
    body = {"model": name, "messages": [{"role": "user", "content": "The quick"}], "max_tokens": 8, "temperature": 0}
    status, reply = send(server, path, body | more)
    return status, json.loads(reply)


def said(server, name):
    status, reply = asked(server, name)
    assert status == 200 and reply["model"] == name, reply
    return reply["choices"][0]["message"]["content"]


def states(server):
    return {one["id"]: one["state"] for one in json.loads(get(server, "/v1/models"))["data"]}


@pytest.fixture(scope="module")
def expected(folders, tmp_path_factory):
    """What each says when it is served alone."""
    found = {}
    for name, place in (("A", "a"), ("B", "b"), ("C", "a-adapter"), ("D", "b-adapter")):
        running = Running(folders / place, ServeSettings(logs=tmp_path_factory.mktemp("logs"), name=name))
        found[name] = said(running, name)
        running.stop()
    assert len(set(found.values())) == 4
    return found


@pytest.fixture
def server(folders, tmp_path):
    """A function that starts A with B, and adapters over both."""
    running = []

    def start(**more):
        infer = {name: more.pop(name) for name in ("ram_gib",) if name in more}
        settings = ServeSettings(logs=tmp_path / "logs", name="A", **more)
        named = [f"C={folders / 'a-adapter'}", f"D={folders / 'b-adapter'}", f"B={folders / 'b'}"]
        running.append(Running(folders / "a", settings, more=named, **infer))
        return running[-1]

    yield start
    for one in running:
        one.stop()


def test_models_and_adapters_by_their_names(server, expected):
    one = server()
    assert states(one) == {"A": "loaded", "C": "loaded", "B": "unloaded", "D": "unloaded"}
    answers = {}
    threads = [threading.Thread(target=lambda n=name: answers.update({n: said(one, n)})) for name in "ABCD"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == expected
    assert set(states(one).values()) == {"loaded"}
    listed = json.loads(get(one, "/v1/models/D"))
    assert listed["id"] == "D" and listed["context_length"] == 256
    assert "outcore_answers_total" in get(one, "/metrics?model=D")
    status, reply = asked(one, "E")
    assert status == 404 and "'A', 'C', 'B', 'D'" in reply["error"]["message"]
    status, reply = asked(one, "C", "/v1/messages")
    assert status == 200 and reply["model"] == "C" and reply["content"][0]["text"] == expected["C"]


def test_a_model_that_nobody_asks_is_closed_and_comes_again(server, expected):
    one = server(unload_after_s=0.3)
    assert said(one, "B") == expected["B"]
    until(lambda: states(one)["B"] == "unloaded")
    assert states(one)["A"] == states(one)["C"] == "loaded", "the first stays"
    assert said(one, "D") == expected["D"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_model_that_does_not_fit_beside_the_loaded_one(server, expected, path):
    one = server(ram_gib=0.0065)
    more = {"input": "x"} if path.endswith("responses") else {}
    status, reply = asked(one, "B", path, **more)
    assert status == 400 and "'B' does not fit beside what is loaded" in reply["error"]["message"]
    assert reply["error"]["type"] == "invalid_request_error"
    assert said(one, "A") == expected["A"], "the others are served on"
    assert "error" in json.loads(get(one, "/v1/models/B"))


def test_a_model_that_cannot_start_gives_its_room_back(server, monkeypatch):
    closed, start = [], Service.start

    def fails(self):
        if self.name == "B":
            raise OSError("no more threads")
        start(self)

    monkeypatch.setattr(Service, "start", fails)
    monkeypatch.setattr(OpenedModel, "close", lambda self, close=OpenedModel.close: (closed.append(self), close(self)))
    assert asked(server(), "B")[0] == 400 and len(closed) == 1


def test_who_waits_for_a_model_takes_no_place_of_another(server, expected, monkeypatch):
    is_open, begun, start, found = threading.Event(), threading.Event(), Service.start, []

    def waits(self):
        if self.name == "B":
            begun.set()
            assert is_open.wait(120)
        start(self)

    one = server(max_queue=1)
    monkeypatch.setattr(Service, "start", waits)
    waiting = threading.Thread(target=lambda: found.append(said(one, "B")))
    waiting.start()
    try:
        assert begun.wait(120) and said(one, "A") == expected["A"]
        status, reply = asked(one, "B")
        assert status == 429 and "1 requests wait until 'B' is loaded" in reply["error"]["message"]
    finally:
        is_open.set()
        waiting.join()
    assert found == [expected["B"]]


class StandIn:
    """What `Models` asks of a service."""

    is_stopping, num_under_way, opened = False, 0, None

    def __init__(self, name="A"):
        self.name, self.settings = name, ServeSettings(unload_after_s=300)

    def close(self):
        pass


def models_of(open_one):
    return Models(StandIn(), [Base(name, None, {name: 0}) for name in "ABCD"], open_one)


def test_one_timer_waits_for_a_model_however_often_it_is_asked():
    async def timers():
        models, loop, delays = models_of(lambda base, opened: StandIn(base.place)), asyncio.get_running_loop(), []
        later = loop.call_later
        loop.call_later = lambda delay, *rest: (delays.append(delay), later(delay, *rest))[1]
        for _ in range(50):
            async with models.held("B"):
                pass
        return delays.count(300)

    assert asyncio.run(timers()) == 1


def test_no_model_is_closed_for_one_that_did_not_fit_without_it():
    asked = []

    def open_one(base, opened):
        asked.append(base.place)
        if base.place == "D":
            raise DoesNotFit("it is large")
        return StandIn(base.place)

    async def run():
        models = models_of(open_one)
        for name, status in (("D", 400), ("B", 0), ("D", 400), ("D", 400)):
            try:
                async with models.held(name):
                    pass
            except ApiError as error:
                assert error.status == status
        assert models.named["B"].state == "loaded" and asked == ["D", "B"]
        await models.close()
        with pytest.raises(ApiError):  # there may be more room by now
            async with models.held("D"):
                pass
        assert asked == ["D", "B", "D"]

    asyncio.run(run())


def test_a_model_stays_open_between_what_is_read_and_its_answer(server, expected, monkeypatch):
    async def late(*given, whole=app.while_connected):
        found = await whole(*given)
        await asyncio.sleep(0.5)
        return found

    one = server(unload_after_s=0.1)
    monkeypatch.setattr(app, "while_connected", late)
    assert said(one, "B") == expected["B"]


def test_an_adapter_whose_base_is_not_here(folders, tmp_path, caplog):
    adapter = tmp_path / "lost"
    shutil.copytree(folders / "b-adapter", adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path / "no")}))
    one = Running(folders / "a", ServeSettings(logs=tmp_path / "logs", name="A"), more=[f"E={adapter}"])
    try:
        for path in ("/v1/chat/completions", "/v1/messages"):
            status, reply = asked(one, "E", path)
            told = reply["error"]["message"]
            assert status == 400 and told == "The model 'E' could not be opened; see the server's log."
        assert str(tmp_path) in caplog.text and str(tmp_path) not in get(one, "/v1/models")
        assert states(one) == {"A": "loaded", "E": "unloaded"} and asked(one, "A")[0] == 200
    finally:
        one.stop()


def test_code_that_one_model_may_bring_is_not_allowed_to_others(folders, tmp_path):
    shutil.copytree(folders / "b", tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    own = {
        "model_type": "of_b",
        "auto_map": {"AutoConfig": "code_of_b.Config", "AutoModelForCausalLM": "code_of_b.Model"},
    }
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | own))
    (tmp_path / "b" / "code_of_b.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    settings = ServeSettings(logs=tmp_path / "logs", name="A")
    one = Running(folders / "a", settings, more=[f"B={tmp_path / 'b'}"], trust_remote_code=True)
    try:
        assert asked(one, "B")[0] == 400 and not (tmp_path / "ran").exists()
        assert asked(one, "A")[0] == 200
    finally:
        one.stop()


def test_names_that_cannot_be(folders, capsys):
    from outcore.serve.main import main

    adapter = f"C={folders / 'a-adapter'}"
    for more, words in (
        (["B"], "NAME=MODEL"),
        ([adapter, adapter], "names two models"),
        ([f"{folders / 'a'}=x"], "names two models"),
        ([f"B={folders / 'nothing.gguf'}"], "is no file"),
    ):
        assert main([str(folders / "a"), *more, "--port", "0"]) == 2
        assert words in capsys.readouterr().err
