"""Packed rows by documents' borders in DeepSpeed's engine: the bits of masks on the CPU, and the kernel where it is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outcore.engine.deepspeed import build
from outcore.model import ModelSettings
from outcore.model.packed import PACKED_ATTENTION
from tests.engine.staged.jobs import TINY, job, passed, run_jobs
from tests.flow.models import tiny_loaded

MASKS = {**TINY, "attn_implementation": "sdpa"}
GO = [["train", 3], ["eval"]]
CASES: dict[str, dict[str, Any]] = {
    "staged": {}, "checkpointed": {"model": {"gradient_checkpointing": True}},
    "stock": {"outcore": {"offload": "stock"}}, "no ZeRO": {"zero": {"zero_stage": "none"}},
    "fp32": {"precision": "fp32"},
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = []
    for name, case in CASES.items():
        more = {key: value for key, value in case.items() if key != "model"}
        for way, model in (("borders", TINY), ("masks", MASKS)):
            jobs.append(job(f"{name}, {way}", GO, model={**model, **case.get("model", {})}, **more))
    for name, more in (("by the kernel", {}), ("recomputed by the kernel", {"gradient_checkpointing": True})):
        jobs.append(job(name, GO, model={**TINY, **more}, small={"imitated_kernel": True}, precision="fp32"))
    return run_jobs(tmp_path_factory.mktemp("packed-rows"), jobs)[0]


@pytest.mark.more
@pytest.mark.parametrize("name", list(CASES))
def test_training_is_the_same_bit_for_bit(results: dict[str, Any], name: str) -> None:
    by_borders, by_masks = (passed(results, f"{name}, {way}") for way in ("borders", "masks"))
    assert "packed rows: masks, made in each layer (no GPU)" in by_borders["said"]
    assert "packed rows: masks, as asked" in by_masks["said"]
    for key in ("losses", "evals", "fingerprint"):
        assert by_borders[key] == by_masks[key]


@pytest.mark.more
@pytest.mark.parametrize(("name", "runs"), [("by the kernel", 1), ("recomputed by the kernel", 2)])
def test_the_kernel_gets_the_documents_of_every_packed_micro_batch(results, name, runs):
    """Imitated, in two layers: one of the two micro-batches of a step is packed. Layers that are computed again in
    the backward pass, where nobody tells borders any more, have them from their forward."""
    found, masked = passed(results, name), passed(results, "fp32, masks")
    assert found["kernel_calls"] == 3 * 2 * runs
    for mine, theirs in zip(found["losses"], masked["losses"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert found["evals"] == pytest.approx(masked["evals"], rel=1e-5)


def test_a_users_loss_of_the_whole_model_keeps_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run the model on other rows than the batch's."""
    run: Any = SimpleNamespace(device="cpu")
    loaded = tiny_loaded("llama")
    loaded.loss_fn = lambda model, batch: torch.zeros(())
    assert build._packed_rows(loaded, ModelSettings(preset="tiny"), run) == ""
    assert loaded.model.config._attn_implementation == "sdpa"
    loaded.loss_fn = None
    assert (
        build._packed_rows(loaded, ModelSettings(preset="tiny", attn_implementation="sdpa"), run) == "masks, as asked"
    )
    assert loaded.model.config._attn_implementation == "sdpa"
    assert "no GPU" in build._packed_rows(loaded, ModelSettings(preset="tiny"), run)
    assert loaded.model.config._attn_implementation == PACKED_ATTENTION


@pytest.mark.gpu
@pytest.mark.parametrize("case", [{}, {"model": {"gradient_checkpointing": True}}])
def test_on_a_gpu_the_kernel_trains_as_masks_do(tmp_path: Path, case: dict[str, Any]) -> None:
    heads = {"hidden_size": 256, "head_dim": 64}
    model = {**TINY, "config_overrides": {**TINY["config_overrides"], **heads}, **case.get("model", {})}
    jobs = [
        job("borders", GO, model=model), job("no ZeRO", GO, model=model, zero={"zero_stage": "none"}),
        job("masks", GO, model={**model, "attn_implementation": "sdpa"}),
    ]  # fmt: skip
    found = run_jobs(tmp_path, jobs, device="cuda")[0]
    masked = passed(found, "masks")
    for name in ("borders", "no ZeRO"):
        by_kernel = passed(found, name)
        assert "packed rows: variable-length flash attention" in by_kernel["said"]
        losses, theirs = ([loss for loss, _ in result["losses"]] for result in (by_kernel, masked))
        assert losses == pytest.approx(theirs, rel=1e-2) and by_kernel["evals"] == pytest.approx(
            masked["evals"], rel=1e-2
        )
