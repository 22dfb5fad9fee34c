"""Whatever the micro-batches, the model and the engine's settings: the same training as plain PyTorch's, bit by bit the
same wherever things live. Default runs are few and always the same; `-m slow` draws many at random."""

import math
import tempfile
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from outcore.common.quantities import MIB
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import discover_units
from tests.engine.stream.plain import BatchShape, PlainTraining, global_batches, num_targets
from tests.flow.models import set_dropout, tiny_loaded

BASE = StreamSettings(
    staging_bytes=2 * MIB,
    slot_bytes=64 * 1024,
    num_slots=2,
    optimizer_threads=1,
    optimizer_backend="torch",
    eps=1e-3,  # a gradient that is zero but for rounding then moves nothing, so that tolerances can be tight
    weight_decay=0.1,
    nvme_path="a temporary folder",  # see engine_of
    seed=5,
)
LR = 1e-2
SLOW = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None, "print_blob": True}
FAST = {**SLOW, "derandomize": True, "phases": (Phase.explicit, Phase.generate)}
"""Shrinking a failure would take minutes: run the slow test of the same name for a small example."""
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Model:
    """A tiny model: `frozen` is a share of its parameters, chosen by name; one at least is trained."""

    kind: str
    tied: bool
    vocab_size: int
    num_layers: int
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    frozen: float = 0.0

    def load(self):
        fields = {"num_hidden_layers": self.num_layers, "n_layer": self.num_layers}
        if self.kind == "mixtral":
            fields |= {"output_router_logits": True, "router_aux_loss_coef": 0.1}
        loaded = tiny_loaded(
            self.kind, dtype=self.dtype, vocab_size=self.vocab_size, tie_word_embeddings=self.tied, **fields
        )
        set_dropout(loaded.model, self.dropout)
        names = sorted(n for n, _ in loaded.model.named_parameters())
        left_out = set(names[: int(self.frozen * len(names))])
        for name, p in loaded.model.named_parameters():
            p.requires_grad_(name not in left_out)
        return loaded


def models(**fixed) -> st.SearchStrategy[Model]:
    return st.builds(
        Model,
        **{
            "kind": st.sampled_from(["llama", "gpt2", "gemma3_text", "mixtral"]), "tied": st.booleans(),
            "vocab_size": st.sampled_from([61, 97, 128, 131, 257]), "num_layers": st.integers(1, 4),
            "frozen": st.sampled_from([0.0, 0.0, 0.5, 0.95]), **fixed,
        },
    )  # fmt: skip


def places(max_grad_norm: st.SearchStrategy[float]) -> st.SearchStrategy[StreamSettings]:
    """Settings that say where things wait and how they travel: none of them may change a result."""

    def choose(frozen_on_nvme: bool, **chosen) -> StreamSettings:
        if chosen["max_grad_norm"] and chosen["update"] == "immediate":
            chosen["update"] = "auto"
        return replace(BASE, **chosen, weight_ram_bytes=0 if frozen_on_nvme else None)

    return st.builds(
        choose, frozen_on_nvme=st.booleans(), max_grad_norm=max_grad_norm,
        update=st.sampled_from(["auto", "deferred", "immediate"]),
        activations=st.sampled_from(["device", "ram", "nvme"]), num_layer_buffers=st.integers(1, 5),
        slot_bytes=st.sampled_from([4096, 64 * 1024]), num_slots=st.integers(1, 3),
        chunk_numel=st.sampled_from([256, 1024, 1 << 14]), staging_bytes=st.sampled_from([MIB // 2, 2 * MIB]),
        optimizer_threads=st.integers(1, 2),
    )  # fmt: skip


@contextmanager
def engine_of(model: Model, chosen: StreamSettings):
    loaded = model.load()
    if chosen.weight_ram_bytes is not None:  # frozen parameters may live on NVMe, in units that are mostly frozen
        layouts = [unit.layout for unit in discover_units(loaded).all]
        if any(2 * layout.trainable_numel >= layout.numel for layout in layouts):
            chosen = replace(chosen, weight_ram_bytes=None)
    with tempfile.TemporaryDirectory() as scratch:
        chosen = replace(chosen, nvme_path=scratch)
        with closing(build_stream_engine(loaded, chosen, device="cpu", pinned_grant=False, trial=False)) as engine:
            yield engine


def saved(engine, folder: Path) -> tuple[dict, dict[str, dict[str, torch.Tensor]]]:
    """(state, family -> tensors by name) of a checkpoint."""
    folder.mkdir(exist_ok=True)
    state = engine.save(folder, lambda path, crc: None)
    families = ("model", "master", "exp_avg", "exp_avg_sq")
    return state, {f: load_file(folder / f"{f}-00001-of-00001.safetensors") for f in families}


Tensors = dict[str, torch.Tensor]


def assert_close(mine: Tensors, theirs: Tensors, exact: Tensors, tolerance: float, what: str) -> None:
    """All tensors together by their norm, and each by its own; where that is nothing but rounding, by a share of the
    largest. Beside that, twice what plain training itself is off by. In 16 bits a single tensor may be off three times
    as far: a gradient that is zero but for rounding (a bias of keys, which softmax cannot see) differs by its size."""
    assert mine.keys() == theirs.keys()
    off = {n: float((mine[n].view(t.shape).float() - t).norm()) for n, t in theirs.items()}
    plainly_off = {n: float((exact[n].view(t.shape) - t).norm()) for n, t in theirs.items()}
    norms = {n: float(t.norm()) for n, t in theirs.items()}
    together = tolerance * math.hypot(*norms.values()) + 2 * math.hypot(*plainly_off.values())
    assert math.hypot(*off.values()) <= together, f"{what}: off by {math.hypot(*off.values())}, allowed {together}"
    each = 3 * tolerance if any(plainly_off.values()) else tolerance
    for name, norm in norms.items():
        allowed = each * norm + each * 1e-2 * max(norms.values()) + 2 * plainly_off[name]
        assert off[name] <= allowed, f"{what} of {name}: off by {off[name]:.3g}, allowed {allowed:.3g}"


def near(plain: float, exact: float, tolerance: float):
    """`plain`, and what is as near to it as rounding allows: `tolerance`, and twice what it is itself off by."""
    return pytest.approx(plain, abs=tolerance * abs(plain) + 2 * abs(plain - exact))


def is_rounded(weight: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether `weight` is the nearest number of its type (of two equally near ones either)."""
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000 if weight.dtype == torch.bfloat16 else torch.tensor(False)
    return bool(((weight == master.to(weight.dtype)) | ties).all())


TOLERANCES = {torch.float32: (2e-5, 5e-4), torch.bfloat16: (3e-3, 4e-2), torch.float16: (1e-3, 1e-2)}
"""Of losses, and of norms and moments. Micro-batches and head chunks are summed in another order than autograd's."""


def in_fp32(model: Model, plain: PlainTraining, chosen: StreamSettings) -> PlainTraining:
    """The same training from the same weights in fp32: how far it is from `plain` tells what rounding does to this very
    case. Adam's first steps on a handful of targets may amplify a rounding a hundredfold, in any order of summation."""
    exact = replace(model, dtype=torch.float32).load()
    with torch.no_grad():
        for mine, theirs in zip(exact.model.parameters(), plain.model.parameters(), strict=True):
            mine.copy_(theirs)
    return PlainTraining(exact, chosen, dropout=model.dropout > 0)


def check_against_plain(model: Model, chosen: StreamSettings, steps: list[list[BatchShape]], held_out) -> None:
    """Losses, norms, masters and both moments after the steps, and the loss of an evaluation."""
    if model.dtype == torch.float16 and chosen.update == "immediate":
        chosen = replace(chosen, update="auto")
    scale = 256.0 if model.dtype == torch.float16 else 1.0
    chosen = replace(chosen, initial_loss_scale=scale)
    plain = PlainTraining(model.load(), chosen, loss_scale=scale, dropout=model.dropout > 0)
    exact = plain if model.dtype == torch.float32 else in_fp32(model, plain, chosen)
    of_loss, of_states = TOLERANCES[model.dtype]
    with tempfile.TemporaryDirectory() as temporary, engine_of(model, chosen) as engine:
        start = {n: m.detach().clone() for n, m in plain.masters.items()}
        for updates, step in enumerate(steps):
            batches = [shape.make(model.vocab_size) for shape in step]
            loss, norm = plain.step(batches, LR)
            exact_loss, exact_norm = (loss, norm) if exact is plain else exact.step(batches, LR)
            result = engine.train_step(batches, LR)
            assert not result.skipped and result.tokens == num_targets(batches)
            assert result.loss == near(loss, exact_loss, of_loss * (1 if exact is plain else 1 + updates))
            assert result.grad_norm == near(norm, exact_norm, of_states)
        _, mine = saved(engine, Path(temporary))
        theirs, ideal = plain.states(), exact.states()
        for family in ("exp_avg", "exp_avg_sq"):
            assert_close(mine[family], theirs[family], ideal[family], 2 * of_states, family)
        masters = (mine["master"], theirs["master"], ideal["master"])
        ways = [{n: t[n].view(start[n].shape) - start[n] for n in start} for t in masters]
        assert_close(*ways, 2 * of_states, "way of the master")
        assert all(is_rounded(w.view(-1), mine["master"][n].view(-1)) for n, w in mine["model"].items())
        batches = [shape.make(model.vocab_size) for shape in held_out]
        found = engine.evaluate(iter(batches))
        loss, tokens, largest_logit = evaluated(plain, batches)
        assert found.tokens == tokens
        if tokens:  # of weights that rounding, and Adam's first steps by the sign, have taken a little apart
            of_logits = 0.0 if exact is plain else torch.finfo(model.dtype).eps * largest_logit / loss
            assert found.loss == near(loss, evaluated(exact, batches)[0], 2 * of_loss + of_logits)


def evaluated(training: PlainTraining, batches) -> tuple[float, int, float]:
    """Mean loss (0 without a target), targets, and the largest logit: its rounding moves a loss of few targets."""
    training.model.eval()
    with torch.no_grad():
        sums = [training.loaded.token_loss()(training.model, batch) for batch in batches]
        inputs = [{n: v for n, v in batch.items() if n != "labels"} for batch in batches]
        largest = max(float(training.model(**batch).logits.abs().max()) for batch in inputs)
    tokens = sum(int(s.n_tokens) for s in sums)
    return sum(float(s.loss_sum) for s in sums) / max(1, tokens), tokens, largest


TILES = st.sampled_from([None, None, 5_000, 20_000]).map(
    lambda size: {"tiling": "on", "tile_bytes": size, "weight_ram_bytes": None} if size else {}
)
"""Computing in tiles adds in another order, so it is the same mathematics but not the same bits."""


def training_cases(**fixed):
    clipping = st.sampled_from([0.0, 0.3, 1.0])
    return given(
        model=models(**fixed),
        chosen=st.builds(
            lambda chosen, tiles, chunk, group: replace(chosen, **tiles, logits_chunk_bytes=chunk, eval_group=group),
            places(clipping), TILES, st.sampled_from([1, 4 * 128 * 16, 1 << 20]), st.integers(1, 4),
        ),
        steps=global_batches(),
        held_out=global_batches(1).map(lambda steps: steps[0]),
    )  # fmt: skip


HALF = {
    "kind": st.sampled_from(["llama", "gpt2", "gemma3_text"]),
    "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
}
"""No mixture of experts: in 16 bits a router's choice between two equals is a matter of rounding."""


@pytest.mark.more
@settings(max_examples=5, **FAST)
@training_cases()
def test_fp32_training_is_plain_pytorch(model, chosen, steps, held_out):
    check_against_plain(model, chosen, steps, held_out)


@settings(max_examples=3, **FAST)
@training_cases(**HALF)
def test_16_bit_training_is_plain_mixed_precision(model, chosen, steps, held_out):
    check_against_plain(model, chosen, steps, held_out)


@settings(max_examples=2, **FAST)
@training_cases(kind=st.just("gpt2"), dropout=st.sampled_from([0.1, 0.5]), frozen=st.just(0.0))
def test_dropout_draws_by_place_in_forward_and_recomputation(model, chosen, steps, held_out):
    """Plain autograd keeps its masks and recomputes nothing; it draws them from the seeds that the engine promises."""
    check_against_plain(model, chosen, steps, held_out)


def check_places(model: Model, one: StreamSettings, other: StreamSettings, steps, resumed: bool) -> None:
    """Two engines with the same mathematics give the same bits, the second perhaps from the first one's checkpoint."""
    if model.dtype == torch.bfloat16:
        other = replace(other, states="split" if one.states == "fp32" else "fp32")
    update = "deferred" if one.max_grad_norm and other.update == "immediate" else other.update
    other = replace(other, max_grad_norm=one.max_grad_norm, update=update)
    batches = [[shape.make(model.vocab_size) for shape in step] for step in steps]
    with tempfile.TemporaryDirectory() as temporary, engine_of(model, one) as first, engine_of(model, other) as second:
        folder = Path(temporary)
        begun = first.train_step(batches[0], LR)
        if resumed:
            with torch.no_grad():
                for p in second.loaded.model.parameters():
                    if p.requires_grad:
                        p.mul_(0.5)
            second.load(folder / "begun", saved(first, folder / "begun")[0])
        else:
            assert second.train_step(batches[0], LR).loss == begun.loss
        results = [(r.loss, r.grad_norm) for r in (engine.train_step(batches[1], LR) for engine in (first, second))]
        assert results[0] == results[1]
        states = [saved(engine, folder / name)[1] for engine, name in ((first, "first"), (second, "second"))]
        for family, tensors in states[0].items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, states[1][family][name]), (family, name)


def place_cases():
    return given(
        model=models(
            kind=st.sampled_from(["llama", "gpt2", "gemma3_text"]),
            dtype=st.sampled_from([torch.float32, torch.bfloat16]),
            dropout=st.sampled_from([0.0, 0.2]),
        ),
        one=places(st.sampled_from([0.0, 0.5])),
        other=places(st.sampled_from([0.0, 0.5])),
        steps=global_batches(),
        resumed=st.booleans(),
    )


@settings(max_examples=3, **FAST)
@place_cases()
def test_results_are_the_same_bits_wherever_things_live(model, one, other, steps, resumed):
    check_places(model, one, other, steps, resumed)


@pytest.mark.slow
@settings(max_examples=400, **SLOW)
@training_cases()
def test_fp32_training_is_plain_pytorch_at_length(model, chosen, steps, held_out):
    check_against_plain(model, chosen, steps, held_out)


@pytest.mark.slow
@settings(max_examples=200, **SLOW)
@training_cases(**HALF)
def test_16_bit_training_is_plain_mixed_precision_at_length(model, chosen, steps, held_out):
    check_against_plain(model, chosen, steps, held_out)


@pytest.mark.slow
@settings(max_examples=200, **SLOW)
@place_cases()
def test_results_are_the_same_bits_at_length(model, one, other, steps, resumed):
    check_places(model, one, other, steps, resumed)
