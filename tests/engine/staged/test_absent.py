"""Parameters without a gradient in a step: it counts as zero, as plain PyTorch with zeroed gradients has it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from outcore.checkpoint.shards import ShardReader
from outcore.engine.deepspeed.state import FAMILIES
from tests.engine.staged.jobs import job, passed, run_jobs, same
from tests.engine.staged.test_nvme import infinity
from tests.model.branch_model import build, coded_batches

CODES = [[1, 1], [3, 3], [2, 1], [0, 0], [0, 3], [0, 2], [3, 0]]
"""Which branches run (bits), by step and micro-batch: one that never ran yet, only the first micro-batch, only the
second, none at all, and again."""
LR, WEIGHT_DECAY, CLIP = 1e-3, 0.1, 0.05
MODEL = {"model_module": f"{Path(__file__).parents[2] / 'model' / 'branch_model.py'}:build"}
OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"weight_decay": WEIGHT_DECAY}}}
SMALL = {"zero_optimization": {"stage3_param_persistence_threshold": 100}, **OPTIMIZER}
PLACES = ["in RAM", "gradients in RAM", "all on NVMe"]
CASES = {
    "fp32": {"precision": "fp32"}, "split states": {}, "no clipping": {"max_grad_norm": 0.0},
}  # fmt: skip


def by_hand(precision: str, clip: float) -> tuple[list[list[float]], dict[str, dict[str, torch.Tensor]]]:
    """([loss, gradient norm] by step, states by family and name) of plain PyTorch whose gradients start at zero."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = build({}, None).to(dtype)
    masters = {name: torch.nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=LR, weight_decay=WEIGHT_DECAY, foreach=False)
    done = []
    for step, codes in enumerate(CODES):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        batches = coded_batches(codes, step)
        total, loss_sum = sum(batch["labels"][:, 1:].numel() for batch in batches), 0.0
        for batch in batches:
            logits = model(batch["input_ids"])[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
            (loss / total).backward()
            loss_sum += float(loss.detach())
        for name, param in model.named_parameters():
            assert param.grad is not None
            masters[name].grad = param.grad.float()
        norm = float(torch.stack([p.grad.norm() for p in masters.values() if p.grad is not None]).norm())
        for master in masters.values():
            assert master.grad is not None
            master.grad /= max(1.0, (norm + 1e-6) / clip) if clip else 1.0
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
        done.append([loss_sum / total, norm])
    states = {name: optimizer.state[master] for name, master in masters.items()}
    families = {family: {n: state[family] for n, state in states.items()} for family in ("exp_avg", "exp_avg_sq")}
    return done, {"master": {name: p.detach() for name, p in masters.items()}, **families}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("staged-absent")
    nvme = folder / "nvme"
    zeros = {
        "in RAM": None, "gradients in RAM": infinity(nvme), "all on NVMe": infinity(nvme, nvme_offload_gradients=True),
    }  # fmt: skip
    jobs = []
    for case, more in CASES.items():
        for place in PLACES:
            name = f"{case}, {place}"
            do = [["train codes", CODES], ["save", str(folder / name)]]
            more = {"max_grad_norm": CLIP, **more}
            jobs.append(
                job(name, do, model=MODEL, zero=zeros[place], config=SMALL, small={"chunk_numel": 2048}, **more)
            )
    absent, taken = ["train codes", [[0, 0]]], ["train codes", [[3, 3]]]
    skipped = [["loss scale", float("inf")], taken, ["loss scale", 1.0]]
    for place in PLACES[::2]:
        for name, between in (("overflow", skipped), ("no overflow", [])):
            jobs.append(
                job(f"{name}, {place}", [absent, *between, absent], model=MODEL, zero=zeros[place], config=SMALL)
            )
    found = run_jobs(folder / "jobs", jobs)[0]
    found["folder"] = folder
    return found


def check(found: dict[str, Any], folder: Path, run: dict[str, Any]) -> None:
    """The job's losses, norms and saved states are those of `by_hand`."""
    expected, states = by_hand(run.get("precision", "bf16"), run.get("max_grad_norm", CLIP))
    for (loss, norm), (their_loss, their_norm) in zip(found["losses"], expected, strict=True):
        assert loss == pytest.approx(their_loss, rel=1e-5) and norm == pytest.approx(their_norm, rel=1e-5)
    for family in FAMILIES:
        reader = ShardReader(folder, family)
        for name, value in states[family].items():
            # Of 16-bit gradients a last bit may differ.
            atol = (1e-6 if family == "master" else 1e-4) * float(value.abs().max())
            torch.testing.assert_close(
                reader.read(name), value, rtol=1e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.more
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", list(CASES))
def test_updates_are_those_of_gradients_that_start_at_zero(results: dict[str, Any], case: str, place: str) -> None:
    name = f"{case}, {place}"
    check(passed(results, name), results["folder"] / name, CASES[case])


@pytest.mark.more
@pytest.mark.parametrize("case", list(CASES))
def test_where_gradients_are_does_not_change_a_bit(results: dict[str, Any], case: str) -> None:
    for place in PLACES[1:]:
        same(passed(results, f"{case}, {place}"), passed(results, f"{case}, in RAM"))
    assert passed(results, f"{case}, all on NVMe")["moved"]["gradient_bytes"] > 0


@pytest.mark.more
@pytest.mark.parametrize("place", PLACES[::2])
def test_gradients_of_a_skipped_step_count_in_none(results: dict[str, Any], place: str) -> None:
    """Infinite ones are left where gradients are summed; the next step has none for these parameters."""
    skipped, never = passed(results, f"overflow, {place}"), passed(results, f"no overflow, {place}")
    assert [norm for _, norm in skipped["losses"]][1] == float("inf")
    assert skipped["losses"][::2] == never["losses"] and skipped["fingerprint"] == never["fingerprint"]


@pytest.mark.more
def test_two_ranks_agree_on_it(tmp_path: Path) -> None:
    """A scale has one element: the second rank's share of it is empty."""
    nvme = tmp_path / "nvme"
    zero = infinity(nvme, nvme_offload_gradients=True)
    run = {"precision": "fp32", "max_grad_norm": CLIP}
    do = [["train codes", CODES], ["save", str(tmp_path / "saved")]]
    small = {"chunk_numel": 2048}
    two = job("two", do, model=MODEL, zero=zero, config=SMALL, small=small, per_device_train_batch_size=1, **run)
    ranks = run_jobs(tmp_path / "jobs", [two], world_size=2)
    assert ranks[1]["two"]["moved"]["gradient_bytes"] > 0
    check(passed(ranks[0], "two"), tmp_path / "saved", run)
