"""Where a model lives while it answers, and how fast that would be: properties of the rule, and the command."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from outcore import cli
from outcore.common.quantities import GIB, MIB
from outcore.flow import discover_units
from outcore.infer.opening.check import kept_of_layers
from outcore.model import resolve_shape, shape_from_config
from outcore.plan import load_hardware
from outcore.plan.inference import (
    plan_inference,
    state_bytes_of,
    to_json,
    words_of,
)
from outcore.sizing.inference import (
    PRESETS,
    AttentionSize,
    DoesNotFit,
    InferenceLimits,
    InferenceNeeds,
    KvSize,
    LayerSize,
    PartSize,
    place_inference,
)
from tests.flow.models import tiny_loaded
from tests.refused import refused


def needs(layers: int = 32, layer_mib: int = 416, ends_mib: int = 1000, token_kib: int = 128) -> InferenceNeeds:
    """About an 8 B model in 16 bits."""
    parts = [PartSize(f"layer {i}", layer_mib * MIB, True) for i in range(layers)]
    ends = [PartSize("embedding", ends_mib * MIB, False), PartSize("head", ends_mib * MIB, False)]
    layer = LayerSize(4096, 14336, (AttentionSize(32, 8, 128, 128),))
    return InferenceNeeds((ends[0], *parts, ends[1]), KvSize(((None, token_kib * 1024),)), layer, 128256, 2)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("vram_gib", [5, 6.5, 8, 12, 24, 80])
def test_what_is_placed_fits(preset, vram_gib):
    limits = InferenceLimits(int(vram_gib * GIB), 64 * GIB)
    placed = place_inference(needs(), limits, preset)
    assert sum(placed.vram_bytes.values()) <= vram_gib * GIB
    weights = sum(part.size_bytes for part in needs().parts)
    assert sum(placed.bytes_at(home) for home in ("vram", "ram", "nvme")) == weights
    assert placed.bytes_at("vram") + placed.travelling_bytes == weights
    assert placed.kv_bytes >= needs().kv.sequence_bytes(placed.context_tokens, placed.chunk_tokens)
    assert placed.bytes_at("nvme") == 0 and placed.lines()


def test_more_memory_keeps_more_weights_and_none_travels_in_the_end():
    stays = [
        place_inference(needs(), InferenceLimits(g * GIB, 64 * GIB), "latency").bytes_at("vram") for g in (5, 8, 16)
    ]
    assert stays == sorted(stays)
    assert place_inference(needs(), InferenceLimits(24 * GIB, 64 * GIB), "latency").travelling_bytes == 0


def test_ram_that_is_short_sends_a_share_of_each_layer_to_the_drive():
    limits = InferenceLimits(6 * GIB, 10 * GIB, has_nvme=True)
    placed = place_inference(needs(), limits, "latency")
    shares = {round(p.ram_bytes / p.size_bytes, 3) for p in placed.parts if p.home == "nvme"}
    assert placed.bytes_at("nvme") > 0 and len(shares) == 1
    refused(
        DoesNotFit, "nvme_offload_path", lambda: place_inference(needs(), InferenceLimits(6 * GIB, 10 * GIB), "latency")
    )


@pytest.mark.parametrize(("ends_mib", "saved"), [(1000, 3 * 416), (2000, 2 * 2000)])
def test_rows_of_an_embedding_are_read_in_ram_and_other_weights_stay_in_its_place(ends_mib, saved):
    """Layers, or where embedding and head did not fit together the head."""
    first, *others = needs(ends_mib=ends_mib).parts
    rows = dataclasses.replace(needs(), parts=(dataclasses.replace(first, is_rows=True), *others))

    def placed(vram_gib, reads_ram=True):
        return place_inference(rows, InferenceLimits(int(vram_gib * GIB), 64 * GIB, reads_ram=reads_ram), "latency")

    less, more = placed(5), placed(5, False)
    assert less.travelling_bytes == more.travelling_bytes - saved * MIB
    assert sum(less.vram_bytes.values()) <= 5 * GIB
    homes = {home.part: home for home in less.parts}
    assert homes["embedding"].is_rows and homes["embedding"].home == "ram" and homes["head"].home == "vram"
    assert less.bytes_at("ram") == less.travelling_bytes + first.size_bytes
    assert any("rows of a pass's tokens" in line for line in less.lines())
    all_but_it, all_of_it = placed(17.5 if ends_mib > 1000 else 17), placed(24)
    assert not all_but_it.travels and any(home.is_rows for home in all_but_it.parts)
    assert "buffers" not in all_but_it.vram_bytes and all(home.home == "vram" for home in all_of_it.parts)
    with pytest.raises(DoesNotFit, match="nvme_offload_path"):
        place_inference(rows, InferenceLimits(6 * GIB, 10 * GIB, reads_ram=True), "latency")


def test_refusals_have_numbers():
    refused(DoesNotFit, r"needs .* GiB of VRAM", lambda: place_inference(needs(), InferenceLimits(1 * GIB, 64 * GIB)))
    with pytest.raises(DoesNotFit, match=r"context [\d,]+ tokens instead of 100,000"):
        place_inference(needs(), InferenceLimits(8 * GIB, 64 * GIB, context_tokens=100_000, kv_home="vram"))
    placed = place_inference(needs(), InferenceLimits(8 * GIB, 64 * GIB, context_tokens=100_000))
    assert placed.kv_home == "ram" and any("live in RAM" in reason for reason in placed.reasons)


@pytest.mark.parametrize(("preset", "home"), [("latency", "vram"), ("balanced", "ram"), ("throughput", "ram")])
def test_keys_and_values_of_many_answers_go_to_ram_where_vram_holds_those_of_one(preset, home):
    limits = InferenceLimits(int(3.4 * GIB), 64 * GIB, context_tokens=1024)
    limits = dataclasses.replace(limits, pass_tokens=1024, chunk_tokens=1024, max_sequences=32)
    placed = place_inference(needs(), limits, preset)
    assert placed.kv_home == home and sum(placed.vram_bytes.values()) <= limits.vram_bytes
    there = place_inference(needs(), dataclasses.replace(limits, kv_home="vram"), preset)
    assert there.kv_home == "vram" and there.kv_bytes >= needs().kv.sequence_bytes(1024, 1024)
    assert sum(there.vram_bytes.values()) <= limits.vram_bytes
    large = dataclasses.replace(limits, kv_bytes=4 * GIB)
    assert place_inference(needs(), large, preset).kv_home == "ram"
    asked = dataclasses.replace(large, kv_home="vram")
    refused(DoesNotFit, "kv_gib asks for 4.00 GiB", lambda: place_inference(needs(), asked, preset))


def test_where_all_weights_stay_keys_and_values_have_room_for_whole_answers():
    one, limits = needs().kv.sequence_bytes(1024, 1024), InferenceLimits(80 * GIB, 64 * GIB, context_tokens=1024)
    assert [place_inference(needs(), limits, preset).kv_bytes // one for preset in PRESETS] == [128, 4, 256]
    short = place_inference(needs(), dataclasses.replace(limits, vram_bytes=18 * GIB), "balanced")
    assert not short.travels and one <= short.kv_bytes < 32 * one and sum(short.vram_bytes.values()) <= 18 * GIB


def test_calls_grow_into_vram_that_nothing_else_uses():
    limits, small = InferenceLimits(80 * GIB, 64 * GIB), needs(layers=8)
    found = {preset: place_inference(small, limits, preset) for preset in PRESETS}
    assert all(placed.chunk_tokens == placed.pass_tokens for placed in found.values())
    first = place_inference(small, dataclasses.replace(limits, pads_calls=True))
    assert first.chunk_tokens == PRESETS["balanced"].chunk_tokens
    asked = dataclasses.replace(limits, chunk_tokens=512)
    assert place_inference(small, asked).chunk_tokens == 512
    given = dataclasses.replace(limits, kv_bytes=2 * GIB)
    needed = sum(place_inference(small, dataclasses.replace(given, pads_calls=True)).vram_bytes.values()) / 0.96
    tight = place_inference(small, dataclasses.replace(given, vram_bytes=int(needed) + 2 * MIB))
    assert not tight.travels and tight.chunk_tokens == first.chunk_tokens
    with_windows = dataclasses.replace(small, kv=KvSize(((None, 1000), (512, 100_000))))
    few = dataclasses.replace(limits, kv_bytes=2 * GIB)  # of a window and a longer call 32 answers would not fit
    assert place_inference(with_windows, few).chunk_tokens == first.chunk_tokens
    travels = place_inference(small, dataclasses.replace(limits, vram_bytes=4 * GIB))
    assert travels.travels and travels.chunk_tokens == first.chunk_tokens


def test_fewer_buffers_where_vram_is_short():
    placed = place_inference(
        needs(layer_mib=1600, ends_mib=2000), InferenceLimits(int(6.5 * GIB), 200 * GIB), "latency"
    )
    assert placed.num_buffers == 2 and "2 layers on the GPU at a time" in placed.reasons[0]


def test_many_answers_have_room_at_once_in_ram_as_far_as_its_share_goes():
    """256 requests of 512 + 128 tokens in one round, not three."""
    placed = place_inference(
        needs(), InferenceLimits(int(6.5 * GIB), 100 * GIB, context_tokens=1024, max_sequences=256), "throughput"
    )
    assert placed.kv_home == "ram" and placed.kv_bytes >= 256 * needs().kv.sequence_bytes(640, 2048)
    short = place_inference(needs(), InferenceLimits(int(6.5 * GIB), 30 * GIB, context_tokens=1024), "throughput")
    assert short.kv_bytes <= 0.4 * 30 * GIB and short.bytes_at("nvme") == 0


@pytest.mark.parametrize("vram_gib", [None, 6.5])
def test_scoring_keeps_no_keys_and_values(vram_gib):
    limits = InferenceLimits(None if vram_gib is None else int(vram_gib * GIB), 24 * GIB, context_tokens=8192)
    whole = place_inference(needs(), limits, "throughput")
    placed = place_inference(needs(), dataclasses.replace(limits, scores_only=True), "throughput")
    assert placed.kv_bytes < 64 * MIB < whole.kv_bytes and placed.context_tokens == whole.context_tokens == 8192
    assert placed.bytes_at("vram") >= whole.bytes_at("vram") and any("scored only" in line for line in placed.lines())


def test_windows_take_no_more_than_they_show():
    kv = KvSize(((None, 1000), (512, 9000)))
    assert kv.sequence_bytes(100_000, 1024) == 100_000 * 1000 + 1536 * 9000


def test_layers_with_a_window_need_its_pages_only():
    shape, laptop = resolve_shape("llama-8b"), load_hardware("rtx4070-laptop")
    sliding = dataclasses.replace(shape, windows=((None, 4), (1024, 28)))
    whole, less = (plan_inference(s, laptop, context=100_000) for s in (shape, sliding))
    one = 4 * 100_000 + 28 * (1024 + less.placement.chunk_tokens)
    assert less.placement.kv_bytes < whole.placement.kv_bytes
    assert less.kv.sequence_bytes(100_000, less.placement.chunk_tokens) == one * 2 * 8 * 128 * 2
    assert less.first_token_s(98_304) < whole.first_token_s(98_304)
    assert less.most_streams(8192) > whole.most_streams(8192) * less.placement.kv_bytes // whole.placement.kv_bytes
    text = "\n".join(words_of(less))
    assert "28 layers see 1,024 tokens only" in text and less.kv.most_tokens(one * 4096, 1024) == 100_000


@pytest.mark.parametrize("model", ["llama-8b", "llama-70b"])
def test_the_command(model, capsys):
    assert cli.main(["plan", "--infer", model, "--machine", "rtx4070-laptop"]) == 0
    text = capsys.readouterr().out
    for word in ("weights:", "keys and values", "binds", "first word", "tokens/s at 1,024"):
        assert word in text
    assert cli.main(["plan", "--infer", "--model", model, "--machine", "rtx4070-laptop", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert ("32768" in found["tokens_per_s"]) is ("32,768 tokens of context do not fit" not in text)
    rates = found["tokens_per_s"]["1024"]
    assert rates["1"] < rates["8"] <= rates["64"] <= rates["256"]
    assert found["bytes"]["vram"] + found["bytes"]["ram"] + found["bytes"]["nvme"] > 15 * 10**9


def test_a_packed_checkpoint_is_planned_as_it_is_packed(tmp_path, capsys):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 300}
    packed = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    limits = {"max_position_embeddings": 700, "num_attention_heads": 4, "num_key_value_heads": 4}
    weights = []
    for more in ({}, packed):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **limits, **more}))
        given = ["plan", "--infer", str(tmp_path), "--machine", "rtx4070-laptop"]
        assert cli.main([*given, "--json"]) == 0
        weights.append(json.loads(capsys.readouterr().out)["bytes"]["vram"])
        assert cli.main(given) == 0 and "the longest context is 700 tokens" in capsys.readouterr().out
    assert weights[1] < 0.5 * weights[0]


def test_a_run_is_planned_by_its_name(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config |= {"vocab_size": 300, "num_attention_heads": 4, "num_key_value_heads": 4}
    folders = ("final_model/finished", "checkpoints/begun/step-00000001", "checkpoints/lora/step-00000001")
    for folder, inside, name in zip(folders, ("", "export", "export"), ("config", "config", "adapter_config")):
        (tmp_path / folder / inside).mkdir(parents=True)
        text = json.dumps({"base_model_name_or_path": "final_model/finished"} if "adapter" in name else config)
        (tmp_path / folder / inside / f"{name}.json").write_text(text)
        (tmp_path / folder / "manifest.json").write_text("{}")
    found = {}
    for name in ("final_model/finished", "finished", "begun", "lora", folders[1]):
        assert cli.main(["plan", "--infer", name, "--machine", "rtx4070-laptop", "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    assert [plan["model"] for plan in found.values()] == ["finished", "finished", "begun", "lora", folders[1]]
    assert len({json.dumps(plan["bytes"]) for plan in found.values()}) == 1
    assert cli.main(["plan", "--infer", "nothing-of-this-name", "--machine", "rtx4070-laptop"]) == 2


def test_the_command_refuses(capsys):
    asked = ["plan", "--infer", "llama-8b", "--machine", "rtx4070-laptop"]
    assert cli.main([*asked, "--context", "1000000"]) == 2
    assert "131072 positions" in capsys.readouterr().err
    assert cli.main([*asked, "--vram_gib", "1.5"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--infer llama-8b --lora_r 4", "lora_r changes nothing beside --infer"),
        ("--infer llama-8b --seq_length 64", "seq_length changes nothing"),
        ("--infer llama-8b --upgrade", "upgrade changes nothing"),
        ("--infer llama-8b --num_gpus 2", "num_gpus changes nothing"),
        (
            "--infer llama-8b --model llama-1b",
            "names a model, and preset llama-1b another. Keep one.\n",
        ),
        ("--model llama-8b --cpu_tokens 4", "cpu_tokens is about answers"),
    ],
)
def test_a_flag_that_would_change_nothing_is_refused(given, words, capsys):
    assert cli.main(["plan", *given.split(), "--machine", "rtx4070-laptop"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("family", "with_keys"), [("qwen3_next", 12), ("nemotron_h", 1), ("mamba2", 0)])
def test_layers_that_keep_states_have_no_keys_and_values(family, with_keys):
    shape, laptop = shape_from_config(family, AutoConfig.for_model(family)), load_hardware("rtx4070-laptop")
    assert sum(layers for _, layers in shape.windows) == with_keys
    small = dataclasses.replace(shape, layer_params=(1000,) * shape.num_layers, embedding_params=1000, head_params=1000)
    plan = plan_inference(small, laptop, context=1024)
    assert plan.kv.token_bytes == 2 * 2 * with_keys * shape.num_kv_heads * shape.head_dim
    assert plan.tokens_per_s(1, 1024) > 0 and words_of(plan)


@pytest.mark.more(after=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "mamba", "nemotron_h", "falcon_h1", "granitemoehybrid"])
def test_recurrent_states_are_counted_before_opening_as_after_it(family, dtype):
    mixed = {"layer_types": ["linear_attention", "full_attention"]}
    fields: dict[str, Any] = mixed if family == "granitemoehybrid" else {}
    loaded = tiny_loaded(family, dtype=dtype, attention="eager" if family.startswith("mamba") else None, **fields)
    kept = kept_of_layers(loaded, discover_units(loaded), "states")
    assert 0 < kept.state_bytes == state_bytes_of(shape_from_config(family, loaded.config), dtype.itemsize)


def test_answers_whose_states_do_not_fit_take_turns():
    laptop = load_hardware("rtx4070-laptop")
    shape = dataclasses.replace(resolve_shape("llama-8b"), states=(10**6, 10**8))
    plain, plan = plan_inference(resolve_shape("llama-8b"), laptop), plan_inference(shape, laptop)
    fit = int((laptop.vram_bytes - laptop.gpu_context_bytes) * PRESETS["balanced"].kv_share) // (2 * 402 * 10**6)
    assert plan.placement.max_sequences == fit < plain.placement.max_sequences == 32
    more = plan.traffic(1, 10, 1, 10).device_bytes - plan.placement.bytes_at("vram") - plan.placement.travelling_bytes
    assert more >= 2 * 402 * 10**6 and "recurrent states" in "\n".join(words_of(plan))
    unknown = plan_inference(dataclasses.replace(shape, states=None), laptop)
    assert "recurrent states are not counted" in "\n".join(words_of(unknown))
    assert to_json(unknown)["state_bytes"] is None and to_json(plan)["state_bytes"] == 402 * 10**6
