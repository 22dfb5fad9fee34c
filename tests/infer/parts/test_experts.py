"""Experts read as they are chosen: the same answers as with their layers, each read once a pass at most."""

from __future__ import annotations

import json
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file

from outcore.flow.experts import chosen, experts_apart, form_of
from outcore.flow.parts import bound
from outcore.infer.opening import AgainstPlan
from outcore.infer.opening import place as placing
from tests.flow.models import needs
from tests.infer.models import MIXTURE, SCARCE, greedy, off_device, opening, prompts_of, save_tiny_model

PROMPTS = prompts_of(4, vocab=280)
DEEPSEEK = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "head_dim": 8}
GIB = 1 << 30
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def found(family, method=None):
        if (family, method) not in made:
            folder = made[family, method] = tmp_path_factory.mktemp(family)
            save_tiny_model(folder, family=family, **MIXTURE, **(DEEPSEEK if family == "deepseek_v3" else {}))
            if method is not None:
                pack_experts(folder, method)
        return made[family, method]

    return found


def pack_experts(folder, method):
    """Make of it a checkpoint as published in 4 bits, with experts of the same size as before and other values."""
    stored, packed = load_file(folder / "model.safetensors"), {}
    for name, value in stored.items():
        if ".experts." not in name or value.ndim < 2 or name.endswith("_bias"):
            packed[name] = value
        elif method == "mxfp4":  # [experts, in, out] is published as [experts, out, in]
            count, columns, rows = value.shape
            packed[name + "_blocks"] = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8)
            packed[name + "_scales"] = torch.randint(121, 124, (count, rows, columns // 32), dtype=torch.uint8)
        else:
            stem, (rows, columns) = name.removesuffix("weight"), value.shape
            packed[stem + "qweight"] = torch.randint(-(2**31), 2**31, (columns // 8, rows)).int()
            packed[stem + "qzeros"] = 0x77777777 ^ (
                torch.randint(0, 2**31, (columns // 16, rows // 8)).int() & 0x11111111
            )
            packed[stem + "scales"] = (torch.rand(columns // 16, rows) / columns**0.5).half()
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))


GPU = [pytest.param(("cuda", share), marks=pytest.mark.gpu, id=f"cuda-{share}") for share in (0, 1)]


@pytest.fixture
def device(request, monkeypatch):
    """The device of (device, share of layers in RAM). On a GPU none stays, though all would have room."""
    name, ram_share = request.param
    if name == "cuda":
        place = placing.place_inference
        monkeypatch.setattr(placing, "place_inference", lambda *args: off_device(place(*args), ram_share))
    return name


def answers(folder, look=lambda opened: None, **settings):
    """(tokens, scores) of the prompts."""
    with opening(folder, **{"device": "cpu", **settings}) as opened:
        found = greedy(opened.engine, PROMPTS, 6, ignore_eos=True)
        scores = opened.engine.score(PROMPTS)
        look(opened)
        return found, scores


FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]


CASES = [("mixtral", None, "nf4", 0), ("gpt_oss", "mxfp4", None, 0), ("qwen3_moe", "gptq", None, 64)]
CASES += [(family, None, None, 0) for family in FAMILIES] + [("gpt_oss", None, "nf4", 64)]
CASES = [pytest.param(*case, marks=needs(case[0]), id="-".join(map(str, case))) for case in CASES]
FORMATS = {None: set(), "nf4": {"nf4"}, "mxfp4": {"mxfp4"}, "gptq": {"int4_16_fp16_zero"}}


@pytest.mark.more(after=1)
@pytest.mark.parametrize("device", [pytest.param(("cpu", 0), id="cpu"), *GPU], indirect=True)
@pytest.mark.parametrize(("family", "method", "quantize", "cpu_tokens"), CASES)
def test_answers_are_those_of_experts_that_come_with_their_layers(
    folder_of, tmp_path, device, family, method, quantize, cpu_tokens
):
    folder, seen, forms, values = folder_of(family, method), [], [], {}
    same = {"quantize": quantize, "cpu_tokens": cpu_tokens, "device": device, "precision": "fp32"}
    same |= {"nvme_path": (tmp_path,), **SCARCE}

    def measure(opened):
        apart = experts_apart(opened.engine.runner.flow.units).expert_units
        forms.extend((part, form_of(part)) for part in apart.values())
        values.update({slot.name: opened.weights.homes.read(slot.name).clone() for slot in forms[-1][0].layout.slots})

    expected = answers(folder, measure, compile="off", expert_cache_gib=0, **same)
    part, form = forms[0]
    assert {slot.packed.format.name for slot in part.layout.packed_slots} == FORMATS[quantize or method]

    def look(opened):
        cache = opened.weights.experts
        assert 0 < cache.num_slots == opened.placement.expert_slots < len(forms) * form.num_experts
        assert "read as they are chosen" in " ".join(opened.placement.lines())
        read, rest = divmod(cache.counts.read_bytes, form.size_bytes)
        assert not rest and read >= cache.counts.asked - cache.counts.hits  # some ahead, in vain
        assert all(torch.equal(opened.weights.homes.read(name), value) for name, value in values.items())
        seen.append((cache.num_slots, cache.counts))
        told, counts = AgainstPlan(opened, None), cache.counts
        assert told.words().startswith(f"{counts.hit_rate:.0%} of {counts.asked:,} experts were there, ")

    for count in (4, 8):
        asked = {
            "expert_cache_gib": (count + 0.5) * form.size_bytes / GIB,
            "ram_gib": 0.0022 if quantize or method else 0.0036,
        }
        found = answers(folder, look, **same, **asked)
        assert found[0] == expected[0]
        for mine, theirs in zip(found[1], expected[1], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3 if cpu_tokens else 2e-4)
    (few, with_few), (many, with_many) = seen
    assert few < many and with_few.hit_rate < with_many.hit_rate and with_few.read_bytes > with_many.read_bytes


@pytest.mark.parametrize("device", GPU, indirect=True)
@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("family", [pytest.param(name, marks=needs(name)) for name in FAMILIES])
def test_scores_in_bf16_are_near(folder_of, tmp_path, device, family, quantize):
    same = {"quantize": quantize, "device": device, "precision": "bf16", "compile": "off", "nvme_path": (tmp_path,)}
    expected = answers(folder_of(family), expert_cache_gib=0, **same)[1]
    found = answers(folder_of(family), expert_cache_gib=0.002, **same)[1]
    pairs = zip(chain(*found), chain(*expected), strict=True)
    apart = sorted(abs(mine - theirs) for mine, theirs in pairs)
    assert apart[len(apart) // 2] < 0.05  # rounding may turn a router's choice: then single ones are far


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=needs("qwen3_moe"))])
def test_no_stack_is_longer_than_torch_multiplies(folder_of, tmp_path, monkeypatch, family):
    same = {"precision": "fp32", "compile": "off", "nvme_path": (tmp_path,), **SCARCE}
    expected, lengths = answers(folder_of(family), **same), []

    def seen(owners, stacks):
        lengths.append(len(stacks[0]))
        return bound(owners, stacks)

    monkeypatch.setattr(chosen, "bound", seen)
    monkeypatch.setattr(chosen, "MOST_STACKED", 3)  # 1,023 on CUDA
    found = answers(folder_of(family), expert_cache_gib=0.002, ram_gib=0.0036, **same)
    assert found[0] == expected[0] and max(lengths) == 3


@pytest.mark.parametrize(("asked", "words"), [
    ({"expert_cache_gib": -1.0}, "expert_cache_gib is -1.0, but must be 0 or above"),
    ({"expert_cache_gib": 1.0, "deterministic": True}, "which experts come together depends on company"),
    ({"expert_cache_gib": 1.0}, "expert_cache_gib does nothing: all weights live in RAM"),
])  # fmt: skip
def test_what_cannot_be_is_refused(folder_of, asked, words):
    with pytest.raises(ValueError, match=words):
        answers(folder_of("mixtral"), **asked)


def test_a_dense_model_has_none(tiny_folder, tmp_path):
    settings = {"nvme_path": (tmp_path,), **SCARCE, "kv_gib": 0.0002}
    with pytest.raises(ValueError, match="no experts that can come alone"):
        answers(tiny_folder[0], **settings, ram_gib=0.0006, expert_cache_gib=0.001)
