"""Batches as the event loop runs them, without a model."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
from outcore.serve.jobs.batches import Batches
from outcore.serve.jobs.files import Files


def test_two_who_cancel_a_batch_both_wait_for_its_end(tmp_path):
    placement = SimpleNamespace(max_sequences=2)
    service = SimpleNamespace(opened=SimpleNamespace(placement=placement), name="tiny", started_s=0)

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
