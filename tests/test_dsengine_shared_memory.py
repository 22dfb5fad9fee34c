"""A run's own shared-memory buffer goes with it, nobody else's."""

from __future__ import annotations

import os

from outcore.engine.deepspeed.shared_memory import remove_own_buffer


def test_only_this_ranks_buffer_of_this_run_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    start = f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1"
    for name in ("29500_0", "29500_1", "29501_0"):
        (tmp_path / f"{start}_{name}").touch()
    remove_own_buffer(0, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{start}_29500_1", f"{start}_29501_0"}
    remove_own_buffer(0, tmp_path)
    monkeypatch.delenv("MASTER_PORT")
    remove_own_buffer(1, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
