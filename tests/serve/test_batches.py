"""Batches over HTTP, and as the event loop runs them without a model."""

import asyncio
import dataclasses
import json
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("fastapi")
from outcore.serve.errors import ApiError
from outcore.serve.jobs.batches import Batches, EngineFailed
from outcore.serve.jobs.files import Files
from tests.serve.running import Running, held
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("one_thread")


def service_of(name="tiny"):
    opened = SimpleNamespace(placement=SimpleNamespace(max_sequences=2))
    return SimpleNamespace(opened=opened, name=name, started_s=0, reading=SimpleNamespace(run=asyncio.to_thread))


def test_a_server_leaves_jobs_of_others_alone(tmp_path):
    """Those of another model, and those that another server works on."""
    job = {"status": "in_progress", "input_file_id": "", "model": "tiny", "created_at": 0}
    made = Batches(service_of(), Files(tmp_path / "files"), tmp_path)
    for number in range(2):
        name = f"batch-{number:032}"
        made._save({**job, "id": name, "request_counts": {"total": 1, "completed": 0, "failed": 0}})
    held = made._journal(made.get(name))

    async def started(model):
        batches = Batches(service_of(model), made.files, tmp_path)
        batches.go_on()
        names = list(batches._tasks)
        await batches.stop()
        return names

    assert asyncio.run(started("another")) == []
    assert asyncio.run(started("tiny")) == [f"batch-{0:032}"]
    with pytest.raises(ApiError, match="in use"):
        asyncio.run(Batches(service_of(), made.files, tmp_path).cancel(name))
    held.close()


def test_a_damaged_description_stops_no_start(tmp_path, caplog):
    made = Batches(service_of(), Files(tmp_path / "files"), tmp_path / "batches")
    whole = {"id": f"batch-{'0' * 32}", "status": "completed", "input_file_id": "", "created_at": 0}
    made._save(whole | {"request_counts": {}})
    wrong = {**whole, "id": f"batch-{'3' * 32}", "created_at": "yesterday", "request_counts": {}}
    kept = made.files.add(b"{}", "in.jsonl", "batch")
    odd = [made.folder / f"batch-{number * 32}.json" for number in "123"]
    odd += [made.files.folder / f"file-{name}.json" for name in ("notes", "1" * 32, "2" * 32)]
    wrong_file = {**dataclasses.asdict(kept), "id": f"file-{'2' * 32}", "created_at": "yesterday"}
    for path, text in zip(odd, ('{"id": "batch-', '{"id": "b"}', json.dumps(wrong), "{}", "[", json.dumps(wrong_file))):
        path.write_text(text)
    made.go_on()
    assert [batch["id"] for batch in made.all()] == [whole["id"]] and made.files.all() == [kept]
    assert all(path.exists() for path in odd) and all(path.name in caplog.text for path in odd[:3])
    with pytest.raises(ApiError, match="no batch"):
        made.get(odd[1].stem)


def test_a_server_killed_at_the_very_end_of_a_job_leaves_no_journal(tmp_path):
    made = Batches(service_of(), Files(tmp_path / "files"), tmp_path)
    job = {"id": f"batch-{'0' * 32}", "status": "completed", "input_file_id": "", "created_at": 0, "request_counts": {}}
    made._save(job)
    made._journal(job).close()
    held = made._journal(job)
    made.go_on()
    assert list(tmp_path.glob("*.journal"))
    held.close()
    made.go_on()
    assert not list(tmp_path.glob("*.journal"))


def test_two_who_cancel_a_batch_both_wait_for_its_end(tmp_path):
    service = service_of()

    async def cancelled():
        batches, ends = Batches(service, Files(tmp_path / "files"), tmp_path / "batches"), asyncio.Event()
        source = batches.files.add(b"", "in.jsonl", "batch").id
        name, counts = f"batch-{'0' * 32}", {"total": 0, "completed": 0, "failed": 0}
        job = {"id": name, "status": "in_progress", "input_file_id": source, "created_at": 0}
        batches._save(job | {"request_counts": counts})

        async def slow_to_end():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(600)
            await ends.wait()

        batches._tasks[name] = asyncio.create_task(slow_to_end())
        both = [asyncio.create_task(batches.cancel(name)) for _ in range(2)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not any(one.done() for one in both)
        ends.set()
        return await asyncio.gather(*both)

    first, second = asyncio.run(cancelled())
    assert first == second and first["status"] == "cancelled"


def test_a_batch_that_was_killed_while_it_ended_is_not_asked_again(tmp_path, monkeypatch):
    made = Batches(service_of(), Files(tmp_path / "files"), tmp_path / "batches")
    job = {"id": f"batch-{'0' * 32}", "status": "in_progress", "created_at": 0}
    job["input_file_id"] = made.files.add(b"{}\n{}\n", "in.jsonl", "batch").id
    made._save(job | {"request_counts": {"total": 2, "completed": 0, "failed": 0}})
    results = [{"n": 0, "error": None}, {"n": 1, "error": "bad"}]
    journal = made._journal(job)
    for number, result in enumerate(results):
        journal.add(number, result)
    journal.close()

    async def go_on():
        batches = Batches(service_of(), made.files, tmp_path / "batches")
        batches.go_on()
        await asyncio.gather(*batches._tasks.values(), return_exceptions=True)
        return batches.all()[0]

    with monkeypatch.context() as killed:
        killed.setattr(Batches, "_save", Mock(side_effect=asyncio.CancelledError))
        assert asyncio.run(go_on())["status"] == "in_progress"
    found = asyncio.run(go_on())
    assert found["status"] == "completed" and len(made.files.all()) == 3
    for kind, result in zip(("output", "error"), results, strict=True):
        assert json.loads(made.files.path(found[f"{kind}_file_id"]).read_text()) == result
    assert not list((tmp_path / "batches").glob("*.journal"))


def test_a_job_that_fails_gives_all_its_places_back(tmp_path):
    """Also that of a line which has its place and did not begin."""

    async def places():
        batches = Batches(service_of(), Files(tmp_path / "files"), tmp_path / "batches")
        job = {"id": f"batch-{'0' * 32}", "status": "in_progress", "created_at": 0}
        job["input_file_id"] = batches.files.add(b"{}\n{}\n{}\n", "in.jsonl", "batch").id

        async def fails(*_):
            await asyncio.sleep(0)
            raise EngineFailed

        batches._answered = fails
        await batches._run(job | {"request_counts": {"total": 3, "completed": 0, "failed": 0}})
        return batches._room._value

    assert asyncio.run(places()) == 1


HELLO = [{"role": "user", "content": "Hello"}]


def batch_lines(count: int) -> bytes:
    body = {"messages": HELLO, "max_tokens": 5, "seed": 1}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(count)]
    return "".join(json.dumps(line) + "\n" for line in [*lines, {"custom_id": "bad", "url": "/v1/none"}]).encode()


def wait_for_batch(client, name):
    return until(lambda: (batch := client.batches.retrieve(name)).status != "in_progress" and batch)


def test_batches(openai, client):
    file = client.files.create(file=("in.jsonl", batch_lines(6)), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch = wait_for_batch(client, made.id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (7, 6, 1)
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [line["custom_id"] for line in lines] == [*map(str, range(6))]
    texts = {line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    [failed] = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
    assert len(texts) == 1 and failed["custom_id"] == "bad" and failed["response"]["status_code"] == 400
    assert made.id in [b.id for b in client.batches.list()]
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch-none")
    for wrong in ({"metadata": {"x": "x" * 513}}, {"completion_window": "x" * 9}):
        asked = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"} | wrong
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.batches.create(**asked)
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("in.jsonl", b"{}"), purpose="assistants")


def test_lines_that_a_failed_pass_ended_are_asked_again(openai, start, tiny_folder, monkeypatch, caplog):
    """As often as passes fail; where the engine fails for good, by the next server."""
    servers = [start(max_sequences=2)]
    runner = servers[0].service.opened.engine.runner
    run, failing = runner.run, iter([True, True])
    monkeypatch.setattr(runner, "run", lambda works: 1 / 0 if next(failing, False) else run(works))

    def ask():
        client = openai.OpenAI(base_url=f"{servers[-1].url}/v1", api_key="unused", max_retries=0, timeout=120)
        file = client.files.create(file=("in.jsonl", batch_lines(3)), purpose="batch")
        return client, client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

    client, made = ask()
    counts = wait_for_batch(client, made.id).request_counts
    assert (counts.completed, counts.failed) == (3, 1)  # one of the lines cannot be
    monkeypatch.setattr(runner, "run", lambda works: 1 / 0)
    client, made = ask()
    until(lambda: "waits for the next start" in caplog.text)
    assert client.batches.retrieve(made.id).status == "in_progress"
    servers[0].stop()
    servers.append(Running(tiny_folder[0], servers[0].service.settings, max_sequences=2))
    client = openai.OpenAI(base_url=f"{servers[-1].url}/v1", api_key="unused", max_retries=0, timeout=120)
    counts = wait_for_batch(client, made.id).request_counts
    assert (counts.completed, counts.failed) == (3, 1)
    servers[-1].stop()


def test_a_line_that_names_another_model_or_holds_what_is_no_number_is_not_answered(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    models = (client.models.list().data[0].id, "gpt-5")
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/chat/completions", "body": {**body, "model": model}}
        for model in models
    ]
    lines.append(lines[0] | {"body": body | {"temperature": 10**400}})  # which ended the whole batch
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    done = wait_for_batch(client, made.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 2)
    assert "'gpt-5' is not here" in client.files.content(done.error_file_id).text


def test_a_line_of_a_batch_is_held_to_the_longest_answer(client):
    body = {"messages": HELLO, "ignore_eos": True}  # the server gives 64 tokens at most
    bodies = [body | {"max_tokens": 65}, body | {"max_completion_tokens": 65}, body | {"max_tokens": 64}, body]
    lines = [{"custom_id": str(i), "url": "/v1/chat/completions", "body": one} for i, one in enumerate(bodies)]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch = wait_for_batch(client, made.id)
    found = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    for line in client.files.content(batch.error_file_id).text.splitlines():
        assert json.loads(line)["error"]["message"].endswith("is 65, but this server gives at most 64.")
    assert [line["response"]["body"]["usage"]["completion_tokens"] for line in found] == [64, 64]


def test_a_batch_of_embeddings(client):
    bodies = [{"input": "The", "model": "tiny"}, {"input": 5}, {"input": "The", "model": "another"}, "The"]
    bodies.append({"input": "The", "dimension": 8})
    lines = [{"custom_id": str(i), "url": "/v1/embeddings", "body": one} for i, one in enumerate(bodies)]
    lines.append({"custom_id": "5", "url": "/v1/completions", "body": {"prompt": "The"}})
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    batch = wait_for_batch(client, made.id)
    [found] = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    wanted = client.embeddings.create(model="tiny", input="The").data[0].embedding
    assert found["custom_id"] == "0" and found["response"]["status_code"] == 200
    assert found["response"]["body"]["data"][0]["embedding"] == pytest.approx(wanted, abs=1e-4)
    errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert [line["custom_id"] for line in errors] == ["1", "2", "3", "4", "5"]
    assert errors[3]["error"]["message"] == "unknown field 'dimension'"


def test_a_batch_that_is_cancelled_keeps_what_was_answered(openai, client, server):
    file = client.files.create(file=("in.jsonl", batch_lines(300)), purpose="batch")
    with held(server.service.opened.engine):
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        with pytest.raises(openai.ConflictError, match="reads this file"):
            client.files.delete(file.id)
        batch = client.batches.cancel(made.id)
    assert batch.status == "cancelled" and client.files.delete(file.id).deleted
    files = [name for name in (batch.output_file_id, batch.error_file_id) if name]
    lines = [json.loads(line) for name in files for line in client.files.content(name).text.splitlines()]
    assert len(lines) == 301 and any(line["error"] and line["error"]["message"] == "cancelled" for line in lines)
