"""Experts of few tokens by their numbers: the answers of those that the host brings, wherever each lies."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outcore.common.errors import EngineError
from outcore.flow import CompiledLayers
from outcore.flow.experts import FewTokens
from outcore.flow.weights import HandOver
from outcore.formats import PackedProducts
from outcore.infer import Request, Sampling
from outcore.infer.opening import InferSettings, against_plan, build, few_tokens, open_engine, weights
from outcore.infer.opening import place as placing
from outcore.infer.passes import SmallPasses
from outcore.sizing.inference import PRESETS, Placement
from outcore.sizing.inference.experts import ExpertSize
from outcore.storage import StorageError, Transfer
from tests.flow.models import needs
from tests.infer import models
from tests.infer.models import SCARCE, AsksHere, off_device, prompts_of
from tests.infer.parts.test_experts import folder_of  # noqa: F401
from tests.refused import refused

CPU = torch.device("cpu")
PROMPTS = prompts_of(4, vocab=280)
SLOTS = 9
pytestmark = pytest.mark.usefixtures("one_thread")
CASES = [("qwen3_moe", None, "nf4"), ("mixtral", None, "nf4"), ("gpt_oss", "mxfp4", None), ("deepseek_v3", None, "nf4")]
CASES = [pytest.param(*case, marks=needs(case[0]), id="-".join(map(str, case))) for case in CASES]
GPU_CASES = [
    ("qwen3_moe", None, "nf4", "auto", "vram"),
    ("qwen3_moe", None, "nf4", "off", "ram"),
    ("mixtral", None, "nf4", "off", "vram"),
    ("gpt_oss", "mxfp4", None, "auto", "vram"),
    ("qwen3_moe", None, "nf4", "off", "drive"),
]


@pytest.fixture
def experts_live(monkeypatch):
    """Have a share of the experts live in RAM, the others on a drive, and come as they are chosen on a CPU."""
    place = placing.place_inference

    def live(share_in_ram):
        def placed(*args):
            made = place(*args)
            if not made.expert_slots:
                return made
            homes = [
                dataclasses.replace(
                    part,
                    home="ram" if share_in_ram == 1 else "nvme",
                    ram_bytes=int(share_in_ram * part.size_bytes),
                )
                if part.is_experts
                else dataclasses.replace(part, home="nvme", ram_bytes=0)  # something has to travel
                for part in made.parts
            ]
            return dataclasses.replace(made, parts=tuple(homes), expert_slots=SLOTS)

        monkeypatch.setattr(placing, "place_inference", placed)
        monkeypatch.setattr(weights, "GRAIN_NUMEL", 1000)  # the cut lies within an expert

    return live


@pytest.fixture
def experts_in_ram(experts_live):
    experts_live(1)


def opened_with(folder, tmp_path, **settings):
    same = {"device": "cpu", "precision": "fp32", "compile": "off", "cpu_tokens": 0, "nvme_path": (tmp_path,)}
    asked = {"expert_cache_gib": 0.0012, "ram_gib": 0.0022, "context": 128, **SCARCE}
    return open_engine(str(folder), InferSettings(**same, **asked, **settings))


def greedy(opened, count=12):
    return models.greedy(opened.engine, PROMPTS, count, ignore_eos=True)


def with_few_tokens(opened, hand_over, *, adapts=True):
    """Have the opened model's passes of few tokens run so; who sees to it."""
    runner, weights = opened.engine.runner, opened.weights
    experts = opened.placement.experts
    sizes = experts.few_tokens, experts.of_token
    few = FewTokens(runner.flow.units, weights.experts, weights.homes, hand_over, weights.chosen, *sizes)
    runner.small = SmallPasses(
        runner.flow, runner.attention, runner.attention.cache, CPU,
        most_rows=few.most_tokens, is_captured=False, experts=few,
    )  # fmt: skip
    if adapts:
        few.decide(0, is_on=True)
    return few


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("family", "method", "quantize"), CASES)
@pytest.mark.usefixtures("experts_in_ram")
def test_answers_are_those_of_experts_that_the_host_brings(folder_of, tmp_path, family, method, quantize):  # noqa: F811
    with closing(opened_with(folder_of(family, method), tmp_path, quantize=quantize)) as opened:
        expected = greedy(opened)
        cache = opened.weights.experts
        before, read = dataclasses.replace(cache.counts), cache.counts.read_bytes
        with PackedProducts(2) as products:
            with_few_tokens(opened, HandOver(products, CPU, AsksHere()))
            assert greedy(opened) == expected
            layers = len(cache.parts)
            assert products.answered()[0] >= 2 * layers * 4, "two questions for every layer of a pass"
        assert cache.num_slots == SLOTS < 8 * layers
        asked, hits = cache.counts.asked - before.asked, cache.counts.hits - before.hits
        assert 0 < hits < asked
        assert cache.counts.read_bytes > read


@pytest.mark.more(after=1)
@pytest.mark.parametrize("share_in_ram", [0.0, 0.4])
def test_experts_on_a_drive_are_read_when_they_are_needed(folder_of, tmp_path, experts_live, share_in_ram):  # noqa: F811
    experts_live(share_in_ram)
    with closing(opened_with(folder_of("qwen3_moe"), tmp_path, quantize="nf4")) as opened:
        expected = greedy(opened)
        with PackedProducts(2) as products:
            few = with_few_tokens(opened, HandOver(products, CPU, AsksHere()))
            assert greedy(opened) == expected
            few.check()
            counts = opened.weights.experts.counts
            assert against_plan(opened).facts()["expert_read_bytes"] - counts.read_bytes == counts.for_cpu_bytes > 0


@pytest.mark.more(after=1)
@pytest.mark.parametrize("at_once", [True, False], ids=["refused", "lost"])
def test_an_expert_that_cannot_be_read_ends_the_pass(folder_of, tmp_path, experts_live, monkeypatch, at_once):  # noqa: F811
    """The next pass reads again, and tells the same as ever; a drive that fails twice in a row is given up."""
    experts_live(0.0)
    monkeypatch.setattr("outcore.infer.schedule.scheduler.AHEAD_S", 0.0)  # by arrival: it decides what slots hold
    opened = opened_with(folder_of("qwen3_moe"), tmp_path, quantize="nf4", draft_tokens=0)
    store, told = opened.weights.homes.store, []
    read, error = store.submit_read, StorageError("read", path=tmp_path, reason="the drive is gone")

    def fails(name, out, *args, **kwargs):
        if "experts" not in name:
            return read(name, out, *args, **kwargs)
        if at_once:
            raise error
        read(name, out, *args, **kwargs).wait()
        out.view(torch.uint8).fill_(255)  # what must not be taken for the expert
        lost = Transfer(out.nbytes, name)
        lost.finish(error)
        return lost

    def answer(name):
        request = Request(name, tuple(PROMPTS[0]), Sampling(temperature=0, max_tokens=6, ignore_eos=True))
        [found] = opened.engine.generate([request], on_piece=told.append)
        return [c.token for c in found.tokens]

    def refuse(name):
        with pytest.raises(EngineError, match=r"experts could not be read.*the drive is gone"):
            answer(name)

    try:
        expected = greedy(opened)[0][:6]
        with PackedProducts(2) as products:
            few = with_few_tokens(opened, HandOver(products, CPU, AsksHere()), adapts=False)
            opened.engine._verify = few.check
            with monkeypatch.context() as patch:
                patch.setattr(store, "submit_read", fails)
                refuse("one")
            assert not any(piece.tokens for piece in told)
            assert answer("two") == expected
            with monkeypatch.context() as patch:
                patch.setattr(store, "submit_read", fails)
                refuse("three")
                refuse("four")
            refuse("five")
    finally:
        opened.close()


@pytest.mark.usefixtures("experts_in_ram")
def test_experts_that_could_not_come_into_slots_end_one_pass(folder_of, tmp_path, monkeypatch):  # noqa: F811
    with closing(opened_with(folder_of("qwen3_moe"), tmp_path, quantize="nf4", draft_tokens=0)) as opened:
        expected = greedy(opened)
        with PackedProducts(2) as products:
            with_few_tokens(opened, HandOver(products, CPU, AsksHere()))
            engine, cache = opened.engine, opened.weights.experts
            adapt, submit = cache.adapt, cache._ranges.submit

            def adapt_in_vain(*args):
                with monkeypatch.context() as patch:
                    patch.setattr(cache._ranges, "submit", lambda *a, **k: Lost(submit(*a, **k)))
                    adapt(*args)

            def answer(name):
                sampling = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
                [found] = engine.generate([Request(name, tuple(PROMPTS[0]), sampling)])
                return [c.token for c in found.tokens]

            assert len(PROMPTS[0]) <= engine.runner.small.experts.most_tokens
            monkeypatch.setattr(cache, "adapt", adapt_in_vain)
            with pytest.raises(EngineError, match="a bad sector"):
                answer("one")
            monkeypatch.undo()
            assert answer("two") == expected[0][:8]


class Lost:
    """In place of an upload that fails."""

    is_from_drive = True

    def __init__(self, under_way):
        self.under_way = under_way

    def wait_stream(self):
        raise EngineError("a bad sector")

    def wait(self, timeout_s=None):
        return self.under_way.wait(timeout_s)


@pytest.mark.parametrize(
    ("family", "quantize", "why"),
    [
        ("qwen3_moe", None, "not two packed matrices"),
        pytest.param("gpt_oss", "nf4", "not packed along what its products sum over", marks=needs("gpt_oss")),
    ],
)
@pytest.mark.usefixtures("experts_in_ram")
def test_what_cannot_run_so_is_told(folder_of, tmp_path, family, quantize, why):  # noqa: F811
    with closing(opened_with(folder_of(family), tmp_path, quantize=quantize)) as opened, PackedProducts(1) as products:
        refused(ValueError, why, lambda: with_few_tokens(opened, HandOver(products, CPU, AsksHere())))


@pytest.mark.more
@pytest.mark.usefixtures("experts_in_ram")
def test_compiled_layers_ask_for_the_experts_of_the_layer_that_runs(folder_of, tmp_path):  # noqa: F811
    with closing(opened_with(folder_of("qwen3_moe"), tmp_path, quantize="nf4")) as opened:
        expected = greedy(opened)
        with PackedProducts(2) as products:
            with_few_tokens(opened, HandOver(products, CPU, AsksHere()))
            runner = opened.engine.runner.flow.runner
            runner.compiled = CompiledLayers(runner.units, "on", backend="eager", training=False, any_shape=True)
            assert greedy(opened) == expected and not runner.compiled.why_not
            assert runner.compiled.num_kinds == 1 < len(runner.units.layers)
            assert products.answered()[0]


@pytest.mark.usefixtures("experts_in_ram")
def test_sequences_that_share_no_rows_leave_experts_to_the_host(folder_of, tmp_path):  # noqa: F811
    with closing(opened_with(folder_of("qwen3_moe"), tmp_path, quantize="nf4")) as opened:
        placement = dataclasses.replace(opened.placement, runs_few=True)
        placed: Any = SimpleNamespace(
            units=opened.engine.runner.flow.units, settings=InferSettings(), way="states", device=torch.device("cuda"),
            placement=placement,
        )  # fmt: skip
        few, found = few_tokens.open_few_tokens(placed, opened.weights, None, ExitStack())
        assert few is None and placement.few_tokens and not found.few_tokens
        placement = found
        assert placement.reasons[-1].endswith("chose: passes run without CUDA graphs")


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "method", "quantize", "compile_choice", "dense"), GPU_CASES)
def test_graphs_run_experts_where_they_lie(
    folder_of,  # noqa: F811
    tmp_path,
    monkeypatch,
    caplog,
    family,
    method,
    quantize,
    compile_choice,
    dense,
):
    place = placing.place_inference

    def placed(needs, limits, preset):
        made = off_device(place(needs, limits, preset), 1)
        if needs.experts is None:
            return made
        if dense == "ram":
            return dataclasses.replace(made, expert_slots=SLOTS)
        homes = [part if part.is_experts else dataclasses.replace(part, home="vram") for part in made.parts]
        if dense == "drive":
            homes = [
                dataclasses.replace(part, home="nvme", ram_bytes=part.size_bytes // 3) if part.is_experts else part
                for part in homes
            ]
        return dataclasses.replace(made, parts=tuple(homes), expert_slots=SLOTS)

    monkeypatch.setattr(placing, "place_inference", placed)
    for module in (few_tokens, build):  # layers eagerly, yet in graphs
        monkeypatch.setattr(module, "runs_graphs", lambda *_: True)
    common = {"device": "cuda", "precision": "fp32", "ram_gib": 1, "context": 128, "quantize": quantize}
    common |= {"expert_cache_gib": 0.0012, "compile": compile_choice}
    if family == "mixtral":  # the GPU reads none in RAM: passes are made anew
        monkeypatch.setattr(few_tokens, "LINKED", (0,))
    if dense == "drive":
        common["nvme_path"] = (tmp_path,)
        monkeypatch.setattr(weights, "GRAIN_NUMEL", 1000)
    found = []
    for is_few in (True, False):
        monkeypatch.setattr(few_tokens, "is_worth_it", lambda own_s, host_s, found=is_few: found)
        with closing(open_engine(str(folder_of(family, method)), InferSettings(**common))) as opened:
            small, counts = opened.engine.runner.small, opened.weights.experts.counts
            before = sum(slot.runs for slot in small._slots.values())
            found.append(greedy(opened))
            assert (sum(slot.runs for slot in small._slots.values()) > before) is is_few
            assert not small.why_not and "without CUDA graphs" not in caplog.text
            if is_few:
                assert any(slot.runs > 2 and slot.is_captured for slot in small._slots.values())
            assert 0 < counts.hits < counts.asked
    assert found[0] == found[1]


class TriedFew(SimpleNamespace):
    """What a trial does with it."""

    is_on, every, most_tokens, adapts = True, 0, 16, False

    def run(self, every):
        self.is_on, self.every = every is not None, self.every if every is None else every

    def decide(self, every, *, is_on):
        self.every, self.is_on, self.adapts = every, is_on, True


def placement_of():
    experts = ExpertSize(1024, 8, 2, 2, expanded_bytes=4096)
    return Placement(PRESETS["balanced"], (), "ram", 0, 128, 1, 128, 128, 3, experts=experts)


@pytest.mark.parametrize(
    ("seconds", "host_s", "expected", "is_on"),
    [
        ({0: 3.0, 4: 2.5, 3: 2.0, 2: 2.2}, 9.0, 3, True),
        ({0: 1.0, 4: 1.5, 3: 2.0, 2: 2.2}, 9.0, 0, True),
        ({0: 3.0}, 2.0, 0, False),
    ],
)
def test_whole_passes_choose_who_computes(seconds, host_s, expected, is_on):
    few: Any = TriedFew(can_link=len(seconds) > 1, said=[])
    few.unlink = lambda: few.said.append("unlinked")
    engine: Any = SimpleNamespace(pass_s=lambda tokens: seconds[few.every] if few.is_on else host_s)
    small: Any = SimpleNamespace(forget=lambda: few.said.append("forgot"), why_not="")
    placed = few_tokens.try_few_tokens(engine, few, small, placement_of())
    [words] = placed.reasons
    assert placed.few_tokens == (16 if is_on else 0)
    assert (few.every, few.is_on, few.adapts) == (expected, is_on, True)
    has_lost = few.can_link and not expected
    assert few.said == ["unlinked"] * has_lost + ["forgot"] * (has_lost or not is_on)
    assert ("where they lie, GPU" in words) is is_on


@pytest.mark.parametrize("passes", [0, 2])
def test_passes_that_no_graph_can_run_leave_experts_to_the_host(passes):
    few: Any = TriedFew(can_link=True)
    small: Any = SimpleNamespace(why_not="" if passes else "no graph")
    asked = []

    def pass_s(tokens):
        asked.append(tokens)
        small.why_not = "no graph"
        return 1.0

    engine: Any = SimpleNamespace(pass_s=pass_s)
    placed = few_tokens.try_few_tokens(engine, few, small, placement_of())
    assert not few.is_on and not placed.few_tokens and len(asked) == passes
    assert placed.reasons == ("the host brings the experts that each layer chose: no graph",)
