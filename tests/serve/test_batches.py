"""Batches as the event loop runs them, without a model."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
from outcore.serve.errors import ApiError
from outcore.serve.jobs.batches import Batches
from outcore.serve.jobs.files import Files


def service_of(name="tiny"):
    return SimpleNamespace(opened=SimpleNamespace(placement=SimpleNamespace(max_sequences=2)), name=name, started_s=0)


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


def test_two_who_cancel_a_batch_both_wait_for_its_end(tmp_path):
    service = service_of()

    async def cancelled():
        batches, ends = Batches(service, Files(tmp_path / "files"), tmp_path / "batches"), asyncio.Event()
        source = batches.files.add(b"", "in.jsonl", "batch").id
        name, counts = f"batch-{'0' * 32}", {"total": 0, "completed": 0, "failed": 0}
        batches._save({"id": name, "status": "in_progress", "input_file_id": source, "request_counts": counts})

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
