"""Both engines with everything on a drive: no read is unchecked, and what the drive changes stops the run by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore.flow.weights import Scratch, choose_verification
from outcore.optim import OptimizerPool
from outcore.storage import TensorStore
from tests.engine.staged.test_states_drive import Run
from tests.engine.stream.training import LR, TINY, batches_of, build
from tests.refused import refused

fixtures = (build,)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> dict[str, TensorStore]:
    """The stores that engines make, by kind."""
    found: dict[str, TensorStore] = {}
    make = Scratch.store

    def made(self: Scratch, kind: str, specs: Any) -> TensorStore:
        found[kind] = make(self, kind, specs)
        return found[kind]

    monkeypatch.setattr(Scratch, "store", made)
    return found


def on_drive(folder: Path, **more: Any) -> Any:
    homes = {"nvme_path": str(folder), "state_ram_bytes": 0, "weight_ram_bytes": 0, "activations": "nvme"}
    return replace(TINY, **{**homes, **more})


@pytest.mark.more(after=1)
@pytest.mark.parametrize("states", ["fp32", "split8"])
def test_every_read_of_a_run_is_covered(build, stores, tmp_path: Path, states: str) -> None:
    more = {"states": states} if states == "fp32" else {"states": states, "max_grad_norm": 0.0}
    engine = build("llama", on_drive(tmp_path / "a", **more), dtype=torch.bfloat16)
    for step in range(2):
        engine.train_step(batches_of(step), LR)
    (tmp_path / "saved").mkdir()
    state = engine.save(tmp_path / "saved", lambda path, crc: None)
    engine.load(tmp_path / "saved", state)
    engine.train_step(batches_of(2), LR)
    engine.evaluate(batches_of(3))
    assert set(stores) >= {"weights", "optimizer states"}
    assert {kind: store.unchecked_bytes for kind, store in stores.items()} == dict.fromkeys(stores, 0)


@pytest.mark.parametrize("kind", ["weights", "optimizer states"])
def test_one_flipped_bit_on_the_drive_stops_the_run(build, stores, tmp_path: Path, kind: str) -> None:
    engine = build("llama", on_drive(tmp_path / "a"))
    engine.train_step(batches_of(0), LR)
    engine.evaluate(batches_of(1))
    store = stores[kind]
    place = store.extent(next(name for name in store.names if "layer 1" in name))[0]
    with open(place.path, "r+b") as file:
        file.seek(place.offset + 100)
        (byte,) = file.read(1)
        file.seek(place.offset + 100)
        file.write(bytes([byte ^ 1]))
    with pytest.raises((OSError, RuntimeError), match=r"layer 1.*came back other than they were written") as caught:
        if kind == "weights":  # a step takes them from RAM, where its last update left them, and writes new ones
            engine.save(tmp_path, lambda path, crc: None)
        for step in range(1, 3):
            engine.train_step(batches_of(step), LR)
    assert str(place.path) in str(caught.value) and "offset" in str(caught.value)
    assert "the last checkpoint is whole" in str(caught.value)


def test_staged_states_parameters_and_gradients_are_covered(stores, tmp_path: Path) -> None:
    with OptimizerPool(2) as pool:
        run = Run([5000, 70001, 33], pool, tmp_path, "fp32", ("params", "gradients"), num_slots=2)
        for _ in range(2):
            run.update()
        run.values()
        run.update(without=(1,))
        run.values()
        assert {kind: store.unchecked_bytes for kind, store in stores.items()} == dict.fromkeys(stores, 0)
        assert all(store.grain_bytes > 1 for store in stores.values()) and len(stores) >= 3
        run.close()


def test_the_header_says_what_is_verified() -> None:
    assert choose_verification("on").rule.one_in == 1 and "every block" in choose_verification("on").words  # type: ignore[union-attr]
    sampled = choose_verification("sampled")
    assert sampled.rule is not None and sampled.rule.one_in == 8 and "GB/s a core" in sampled.words
    assert choose_verification("off").rule is None and "as it comes" in choose_verification("off").words
    assert choose_verification("auto", direct=True).rule.one_in == 8  # type: ignore[union-attr]
    refused(ValueError, "nvme_checksums must be", lambda: choose_verification("maybe"))  # type: ignore[arg-type]
