"""Weights multiplied where they are: the same answers, and what a start and a plan say of it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from outcore import cli
from outcore.flow import discover_units
from outcore.flow.weights import HandOver
from outcore.formats import DeviceProducts, PackedProducts
from outcore.formats.gguf_files import write_gguf
from outcore.infer.opening import InferSettings, forecast, in_place, open_engine, trials
from outcore.infer.opening import place as placing
from outcore.model import ModelSettings, load_model
from outcore.plan import load_hardware
from outcore.plan.learned import known_rates
from outcore.sizing.inference import (
    InPlaceRates,
    Placement,
)
from tests.infer.models import greedy, off_device, opening, prompts_of, save_tiny_model
from tests.refused import refused

PROMPTS = prompts_of(4, vocab=280)


@pytest.fixture(scope="module")
def tiny_file(tiny_folder, tmp_path_factory):
    pytest.importorskip("gguf")
    return write_gguf(tiny_folder[0], tmp_path_factory.mktemp("gguf") / "model.gguf", "q8_0")


def answers(folder, count=10, **settings):
    with opening(folder, **{"device": "cpu", **settings}) as opened:
        found = greedy(opened.engine, PROMPTS, count, ignore_eos=True)
        return found, opened.engine.score(PROMPTS), opened.placement


@pytest.mark.more(after=2)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("settings", [{}, {"deterministic": True}], ids=["kernels", "expanded"])
def test_embedding_and_head_stay_packed(tmp_path, is_tied, settings):
    """As GGUF files have them: the answers and scores of their values, which are in memory at no time."""
    pytest.importorskip("gguf")
    save_tiny_model(tmp_path / "model", family="llama", tie_word_embeddings=is_tied)
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", "q8_0")
    opened = open_engine(str(file), InferSettings(context=64, device="cpu", precision="fp32", **settings))
    homes, values = opened.weights.homes, {}
    try:
        for name in homes.names():
            values[name] = homes.read(name).clone()
        packed = {name for name in values if homes.slot(name)[1].packed is not None}
        scores = opened.engine.score(PROMPTS)
    finally:
        opened.close()
    assert {"model.embed_tokens.weight"} | (set() if is_tied else {"lm_head.weight"}) <= packed
    save_file(values, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with opening(tmp_path / "model", context=64, device="cpu", precision="fp32") as plain:
        for ours, theirs in zip(scores, plain.engine.score(PROMPTS), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


def test_answers_and_scores_are_those_of_expanded_weights(tiny_file, tmp_path):
    tokens, scores, placement = answers(tiny_file, cpu_tokens=64)
    plain = answers(tiny_file, cpu_tokens=0)
    assert placement.cpu_tokens == 64 and plain[2].cpu_tokens == 0
    assert (tokens, scores) == plain[:2]
    drive = {"nvme_path": (tmp_path,), "ram_gib": 0.0006, "kv_gib": 0.0002, "max_sequences": 2}
    assert answers(tiny_file, cpu_tokens=64, **drive)[0] == tokens
    measured = answers(tiny_file)
    assert measured[0] == tokens and "multiplied as they are: q8_0" in " ".join(measured[2].lines())


@pytest.mark.more(after=1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_multiplied_by_pairs_and_one_by_one(family, tmp_path, monkeypatch):
    """Few tokens in one call for a matrix of all experts, many expert by expert."""
    fields = {"intermediate_size": 128, "moe_intermediate_size": 128, "num_local_experts": 4, "num_experts": 4}
    save_tiny_model(tmp_path, family=family, num_experts_per_tok=2, **fields)
    plain = answers(tmp_path, quantize="nf4", cpu_tokens=0)
    taken, product, by_pairs = set(), PackedProducts.multiply, PackedProducts.multiply_chosen

    def seen(self, call, x, out=None):
        taken.add(("one", call.rows, call.columns))
        return product(self, call, x, out)

    def seen_pairs(self, stack, x, numbers, share, out=None):
        taken.add(("pairs", stack.first.rows, stack.first.columns))
        return by_pairs(self, stack, x, numbers, share, out)

    monkeypatch.setattr(PackedProducts, "multiply", seen)
    monkeypatch.setattr(PackedProducts, "multiply_chosen", seen_pairs)
    for most_pairs in (1024, 4):
        monkeypatch.setattr(PackedProducts, "MOST_PAIRS", most_pairs)
        found = answers(tmp_path, quantize="nf4", cpu_tokens=64)
        assert found[0] == plain[0]
        for mine, theirs in zip(found[1], plain[1], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)
        up, down = (256, 64), (64, 128)
        assert {("pairs", *up), ("pairs", *down)} <= taken
        assert (("one", *up) in taken) is (("one", *down) in taken) is (most_pairs == 4)


def test_a_pass_for_nobody_leaves_nothing(tiny_folder):
    with opening(tiny_folder[0], device="cpu") as opened:
        passes = []
        opened.engine.observers.append(lambda works, seconds: passes.append(sum(work.count for work in works)))
        assert opened.engine.pass_s(4) > 0 and passes == [4, 4, 4]
        assert opened.engine.counts.passes == opened.engine.num_running == 0
        assert opened.engine.pass_s(1000) > 0, "more than the context has room for"


@pytest.mark.parametrize(("name", "settings"), [("nf4", {"quantize": "nf4"}), ("bf16", {"precision": "bf16"})])
def test_a_start_leaves_its_rates_to_the_planner(tiny_folder, tmp_path, monkeypatch, name, settings):
    monkeypatch.chdir(tmp_path)
    here, rates = load_hardware("rtx4070-laptop"), InPlaceRates({1: 40.0, 128: 1.0}, 20.0, 1e-3)
    monkeypatch.setattr(forecast, "load_hardware", lambda: here)
    with opening(tiny_folder[0], device="cpu", **settings) as opened:
        forecast.against_plan(opened)
        assert known_rates(here) == {}
        opened.placement = dataclasses.replace(opened.placement, cpu_rates=rates)
        assert forecast.against_plan(opened).plan is not None and known_rates(here) == {name: rates}


@pytest.mark.more(after=1)
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_file_is_planned_as_it_is_packed(tmp_path, capsys, is_tied):
    """Embedding and head, too."""
    pytest.importorskip("gguf")
    from tests.formats.test_gguf import folder_of

    folder = folder_of(tmp_path, vocab_size=2000, tie_word_embeddings=is_tied)
    file = write_gguf(folder, tmp_path / "model.gguf", "q4_k")
    opened = open_engine(str(file), InferSettings(context=64, device="cpu", precision="bf16"))
    held = sum(part.size_bytes for part in opened.placement.parts)
    opened.close()
    assert cli.main(["plan", "--infer", str(file), "--machine", "rtx4070-laptop", "--json"]) == 0
    assert sum(json.loads(capsys.readouterr().out)["bytes"].values()) == pytest.approx(held, rel=0.02)


def test_what_does_nothing_is_refused(tiny_file):
    words = "quantize nf4: its matrices are packed in q8_0 already"
    refused(ValueError, words, lambda: answers(tiny_file, quantize="nf4"))
    refused(ValueError, "cpu_tokens does nothing", lambda: InferSettings(cpu_tokens=4, deterministic=True))
    refused(ValueError, "cpu_tokens is -1", lambda: InferSettings(cpu_tokens=-1))


@pytest.fixture(scope="module")
def file_of_kernels(tmp_path_factory):
    """A file all of whose matrices the kernels multiply: columns in steps of 64."""
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("of_kernels")
    save_tiny_model(folder / "model", intermediate_size=128)
    return write_gguf(folder / "model", folder / "model.gguf", "q8_0")


@pytest.fixture(scope="module")
def folder_of_16_bits(tmp_path_factory):
    """A model whose likeliest tokens are the same in fp16 and fp32."""
    folder = tmp_path_factory.mktemp("of_16_bits")
    save_tiny_model(folder, intermediate_size=128, seed=3)
    return folder


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_cpu_multiplies_16_bits_as_they_are(folder_of_16_bits, monkeypatch, precision):
    """In passes of few tokens, with the head; texts that are scored and larger passes have torch's products."""
    multiply, asked = PackedProducts.multiply, set()

    def seen(self, call, x, out=None):
        asked.add((call.rows, len(x)))
        return multiply(self, call, x, out)

    monkeypatch.setattr(PackedProducts, "multiply", seen)
    found = answers(folder_of_16_bits, precision=precision, cpu_tokens=8)
    rows = {rows for rows, _ in asked}
    assert {64, 32, 128} < rows and max(rows) > 256 and max(m for _, m in asked) <= 8
    asked.clear()
    plain = answers(folder_of_16_bits, precision=precision, cpu_tokens=0)
    assert not asked and found[:2] == plain[:2]
    assert answers(folder_of_16_bits, precision=precision, deterministic=True)[0] == plain[0] and not asked
    measured = answers(folder_of_16_bits, precision=precision)
    assert measured[0] == plain[0] and f"multiplied as they are: {precision} up to" in " ".join(measured[2].lines())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("compile_choice", "link", "on_cpu"), [("auto", 1.0, 1), ("auto", 1e-3, 3), ("off", 1e-3, 3)])
def test_the_cpu_computes_layers_for_the_gpu(
    file_of_kernels, folder_of_16_bits, monkeypatch, caplog, compile_choice, link, on_cpu, precision
):
    """Packed ones, and those of 16 bits."""
    model = file_of_kernels if precision == "fp32" else folder_of_16_bits
    place, multiply, listen = placing.place_inference, HandOver.multiply, PackedProducts.listen
    calls, listening = [], []
    monkeypatch.setattr(placing, "place_inference", lambda *args: off_device(place(*args), 1))
    monkeypatch.setattr(in_place, "InPlaceRates", lambda found, *_: InPlaceRates(dict.fromkeys(found, 1.0), link, 0.0))
    monkeypatch.setattr(HandOver, "multiply", lambda self, *args: (calls.append(1), multiply(self, *args))[1])
    monkeypatch.setattr(PackedProducts, "listen", lambda self, *args: (listening.append(self), listen(self, *args))[1])
    common = {"device": "cuda", "precision": precision, "ram_gib": 1, "compile": compile_choice}
    tokens, scores, placement = answers(model, cpu_tokens=16, **common)
    assert len(placement.on_cpu(1)) == on_cpu and placement.cpu_tokens == 16
    of_trial = 5 * 16 - 16  # replays at the start of a graph of so many, which was made by as many calls
    graphs_asked = listening[0].answered()[0] - len(calls) > of_trial
    assert graphs_asked is (compile_choice == "auto"), "without a call"
    assert "without CUDA graphs" not in caplog.text
    expected = answers(model, cpu_tokens=0, **common)
    assert tokens == expected[0]
    for mine, theirs in zip(scores, expected[1], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compile_choice", ["auto", "off"])
@pytest.mark.parametrize("travels", [False, True])
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_the_gpu_multiplies_packed_weights_as_they_are(
    tmp_path, monkeypatch, caplog, compile_choice, travels, quantize
):
    save_tiny_model(tmp_path, hidden_size=128, intermediate_size=256)
    place, multiply, rows = placing.place_inference, DeviceProducts.multiply, []
    if travels:
        monkeypatch.setattr(placing, "place_inference", lambda *args: off_device(place(*args), 1))
    common = {"device": "cuda", "precision": "fp32", "ram_gib": 1, "compile": compile_choice, "cpu_tokens": 0}

    def multiplied(self, spec, planes, x):
        rows.append(len(x))
        return multiply(self, spec, planes, x)

    def trial(products, spec, dtype):
        return dict.fromkeys((1, 2, 4, 8), 1e-12), 1e-6, 1e-5

    monkeypatch.setattr(trials, "_device_seconds", trial)
    monkeypatch.setattr(DeviceProducts, "multiply", multiplied)
    tokens, scores, placement = answers(tmp_path, quantize=quantize, **common)
    assert placement.packed_tokens == 8 and rows and max(rows) <= 8
    assert "up to 8 tokens the GPU multiplies packed weights as they are" in " ".join(placement.lines())
    assert "without CUDA graphs" not in caplog.text and "layers run eagerly" not in caplog.text
    monkeypatch.setattr(trials, "_device_seconds", lambda *_: ({}, 1e-5, 1e-6))
    rows.clear()
    expected = answers(tmp_path, quantize=quantize, **common)
    assert not rows and expected[2].packed_tokens == 0
    assert tokens == expected[0]
    for mine, theirs in zip(scores, expected[1], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4), "scores do not depend on the number of rows"


@pytest.mark.gpu
def test_the_trial_of_the_gpu_finds_its_kernels_worth_it():
    loaded = load_model(ModelSettings(preset="tiny", precision="bf16", seq_length=2, quantize="nf4"))
    loaded.model.requires_grad_(False)
    units = discover_units(loaded)
    seconds, words = trials.device_seconds(units, torch.device("cuda", 0))
    assert (
        {*seconds} <= {*Placement.PACKED_ROWS} and all(1e-14 < s < 1e-6 for s in seconds.values()) and "nf4" in words[0]
    )
