"""A model opened by name: wherever its weights live and however it is adapted, it says what the whole model says."""

import dataclasses
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from outcore.config.commands.running import generate_flags
from outcore.flow import discover_units
from outcore.infer.commands.options import settings_of
from outcore.infer.opening import InferSettings, open_engine, plan_as_opened, weights
from outcore.infer.opening.model import find_place
from outcore.model import resolve_shape
from outcore.plan import load_hardware
from outcore.plan.inference import plan_inference
from outcore.sizing.inference import DoesNotFit
from tests.flow.models import tiny_loaded
from tests.infer.models import greedy, greedy_by_transformers, on_the_drive, opening, prompts_of, save_tiny_model
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = prompts_of(4, vocab=280)


def answers(name, count: int = 10, check=lambda opened: None, after=lambda opened: None, **settings) -> list[list[int]]:
    with opening(name, **settings) as opened:
        check(opened)
        found = greedy(opened.engine, PROMPTS, count, ignore_eos=True)
        after(opened)
        return found


@pytest.fixture(scope="module")
def expected(tiny_folder):
    _, model, _ = tiny_folder
    return [greedy_by_transformers(model, prompt, 10) for prompt in PROMPTS]


def test_weights_on_a_drive(tiny_folder, expected, tmp_path):
    def check(opened):
        assert opened.placement.bytes_at("nvme") > 0 and opened.weights.homes.nvme_bytes > 0

    def waited(opened):
        waited_s = opened.weights.arrival.waited_s()
        assert set(waited_s) == {"pcie", "nvme"} and sum(waited_s.values()) > 0

    small = {"ram_gib": 0.0006, "kv_gib": 0.0002, "max_sequences": 2}
    assert answers(tiny_folder[0], check=check, after=waited, nvme_path=(tmp_path,), **small) == expected


def test_reads_for_a_next_pass_that_does_not_come_are_no_failure(tmp_path, caplog):
    save_tiny_model(tmp_path / "deep", num_hidden_layers=6)
    assert answers(tmp_path / "deep", nvme_path=(tmp_path,), ram_gib=0.0006, kv_gib=0.0002, max_sequences=2)
    assert not caplog.records


def test_a_model_without_adapters_does_not_wait_for_peft(tiny_folder, expected, monkeypatch):
    """Its import takes seconds, and has a library beside it complain of what is not installed."""
    monkeypatch.setitem(sys.modules, "peft", None)

    def planned(opened):
        plan = plan_as_opened(opened, load_hardware("rtx4070-laptop"))
        assert plan.tokens_per_s(1, 64) > 0 and not plan.shape.quantize

    assert answers(tiny_folder[0], check=planned) == expected


def test_keys_and_values_in_8_bits_are_close(tiny_folder, expected):
    def planned(opened):
        cache, plan = opened.engine.scheduler.cache, plan_as_opened(opened, load_hardware("rtx4070-laptop"))
        assert plan.kv.token_bytes == 3 * 2 * 2 * (16 + 4) and cache.settings.kv_format == "int8"

    found = answers(tiny_folder[0], kv_format="int8", check=planned)
    same = sum(a == b for mine, theirs in zip(found, expected) for a, b in zip(mine, theirs))
    assert same >= 20  # of 40: a random model falls apart after the first difference


def test_an_adapter_beside_its_base(tiny_folder, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tiny_folder[0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    wanted = [greedy_by_transformers(adapted.eval(), prompt, 10) for prompt in PROMPTS]
    assert answers(tmp_path / "adapter") == wanted
    assert answers(folder, adapter=str(tmp_path / "adapter")) == wanted
    save_tiny_model(tmp_path / "other", family="phi3", pad_token_id=0)
    with pytest.raises(ValueError, match="trained on another model"):  # which has no q_proj
        answers(tmp_path / "other", adapter=str(tmp_path / "adapter"))


@pytest.mark.parametrize("fields, words", [
    ({"target_modules": ["embed_tokens", "q_proj"]}, "brings embed_tokens whole"),
    ({"target_modules": ["q_proj"], "trainable_token_indices": [5, 9]}, "brings embed_tokens whole"),
    ({"target_modules": ["q_proj"], "alora_invocation_tokens": [5]}, "of the kind ALORA"),
])  # fmt: skip
def test_an_adapter_that_is_more_than_lora_is_refused(tiny_folder, tmp_path, fields, words):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder[0])
    get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **fields)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        answers(tmp_path)


def test_an_adapter_that_trained_biases_is_refused(tmp_path):
    """Biases come with the base, and what torch said of these told nobody what to do."""
    from peft import LoraConfig, get_peft_model

    model, _ = save_tiny_model(tmp_path / "base", family="qwen2")
    config = LoraConfig(r=4, target_modules=["q_proj"], bias="lora_only", task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="brings q_proj whole, in rows or with a bias"):
        answers(tmp_path / "base", adapter=str(tmp_path / "adapter"))


def test_scores_are_the_models_own(tiny_folder):
    folder, model, _ = tiny_folder
    with opening(folder, chunk_tokens=32) as opened:
        scores = opened.engine.score(PROMPTS)
    for prompt, found in zip(PROMPTS, scores):
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=torch.tensor([prompt])).logits[0], -1)
        wanted = [float(logprobs[i - 1, token]) for i, token in enumerate(prompt) if i]
        assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("family, more", [("phi3", {}), ("phimoe", {"num_local_experts": 4})])
def test_rotary_factors_follow_the_context_and_no_other_text(tmp_path, family, more):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "short_mscale": 1.1, "long_mscale": 1.3}
    sizes = {"positions": 128, "original_max_position_embeddings": 32, "pad_token_id": 0}
    model, _ = save_tiny_model(tmp_path, family=family, rope_parameters=rope, **sizes, **more)
    short, long = PROMPTS[0], [3 + i % 50 for i in range(40)]
    for context, prompt in ((None, short), (128, long)):
        wanted = greedy_by_transformers(model, prompt, 10)
        with opening(tmp_path, context=context) as opened:
            assert opened.placement.context_tokens == (context or 32)
            assert greedy(opened.engine, [prompt, short], 10, ignore_eos=True)[0] == wanted
            assert greedy(opened.engine, [prompt], 10, ignore_eos=True) == [wanted]
    planned = plan_inference(resolve_shape(str(tmp_path)), load_hardware("rtx4070-laptop"))
    assert planned.placement.context_tokens == 32
    found_tokens = []
    for context in (None, None, 128):
        kept = {"prefix_path": tmp_path / "kept", "prefix_gib": 0.01, "page_tokens": 8}
        with opening(tmp_path, context=context, **kept) as opened:
            greedy(opened.engine, [long[:20]], 4)
            found_tokens.append(opened.engine.scheduler.cache.counts.found_tokens)
    assert found_tokens == [0, 16, 0], "pages that were kept are of one set, too"


def test_refused_with_numbers(tiny_folder, tmp_path):
    folder = str(tiny_folder[0])
    refused(DoesNotFit, "--nvme_offload_path", lambda: open_engine(folder, InferSettings(ram_gib=0.0001, context=64)))
    refused(ValueError, "knows 512 positions", lambda: open_engine(folder, InferSettings(context=4096)))
    with pytest.raises(ValueError, match="does nothing on a CPU"):
        open_engine(folder, InferSettings(device="cpu", kv_home="vram"))
    refused(ValueError, "chunk_tokens", lambda: InferSettings(pass_tokens=32, chunk_tokens=64))
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(ValueError, "names no base model", lambda: find_place(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")  # as `outcore export` leaves it beside an adapter
    (tmp_path / "adapter_model.safetensors").touch()
    refused(ValueError, "names no base model", lambda: find_place(str(tmp_path)))
    (tmp_path / "model.safetensors").touch()
    assert find_place(str(tmp_path)).adapter is None
    refused(ValueError, "holds no adapter_config", lambda: find_place(folder, folder))
    refused(ValueError, "is no file here", lambda: find_place(str(tmp_path / "mistyped.gguf")))


@pytest.fixture(scope="module")
def lora_run(tiny_folder, tmp_path_factory):
    """A function that trains adapters for two steps on the tiny model; returns the run's root."""
    from outcore.train.run import main
    from tests.train.jobs import flags

    folder = tmp_path_factory.mktemp("lora")
    corpus = folder / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog. " * 400)

    def train(name: str, *more: str):
        argv = ["--model_name_or_path", str(tiny_folder[0]), "--run_name", name, "--lora_r", "4", "--precision", "fp32"]
        argv += ["--max_steps", "2", "--lr", "3e-2", "--eval_steps", "0", "--save_steps", "2", *more]
        assert main(flags(folder / name, corpus, *argv)) == 0
        return folder / name

    return train


@pytest.mark.slow
def test_a_checkpoint_of_a_lora_run_answers_as_its_merged_export(lora_run, tiny_folder, monkeypatch):
    root = lora_run("plain")
    merged = answers(root / "export/plain")
    assert merged != answers(tiny_folder[0])
    checkpoint = root / "checkpoint/plain/step-00000002"
    assert answers(checkpoint) == merged
    assert answers(tiny_folder[0], adapter=str(checkpoint)) == merged
    (root / "checkpoint").rename(root / "checkpoints")
    monkeypatch.chdir(root)
    assert answers("plain") == merged  # by the run's name, before it exported anything


@pytest.mark.slow
def test_a_base_is_packed_as_the_adapter_was_trained_over_it(lora_run):
    root = lora_run("packed", "--quantize", "nf4")
    checkpoint = root / "checkpoint/packed/step-00000002"

    def check(opened):
        packed = opened.weights.homes
        assert opened.found.loaded.quantize == "nf4" and packed

    assert answers(checkpoint, check=check) == answers(root / "export/packed")
    with pytest.raises(ValueError, match="trained over a base in nf4"):
        open_engine(str(checkpoint), InferSettings(quantize="int8"))


def test_weights_packed_as_they_come(tiny_folder, tmp_path, monkeypatch):
    def size(opened):
        sizes.append(opened.placement.bytes_at("ram"))
        formats.append(plan_as_opened(opened, load_hardware("rtx4070-laptop")).shape.quantize)

    sizes, formats = list[int](), list[str]()
    found = {kind: answers(tiny_folder[0], quantize=kind, check=size) for kind in (None, "nf4")}
    found["exact"] = answers(tiny_folder[0], quantize="nf4", cpu_tokens=0)
    assert sizes[1] < 0.6 * sizes[0] and formats == ["", "nf4"] and found["nf4"] != found[None]

    def shares(opened):
        arrival = opened.engine.runner.flow.arrival
        assert arrival._expansion is arrival._travelling._expansion, "one buffer, as the placement counts"

    on_the_drive(monkeypatch)
    spill = {"quantize": "nf4", "cpu_tokens": 0, "nvme_path": (tmp_path,)}
    assert answers(tiny_folder[0], check=shares, **spill) == found["exact"]
    assert answers(tiny_folder[0], check=shares, **spill, prefetch=0, buffer_mib=0.25) == found["exact"]
    monkeypatch.undo()
    refused(ValueError, "no matrix of this model divides", lambda: answers(tiny_folder[0], quantize="int8"))
    refused(ValueError, "must be one of nf4, int8", lambda: InferSettings(quantize="int3"))


@pytest.mark.parametrize("asked, words", [
    ({"pin_memory": False, "pin_gib": 1.0}, "pin_gib does nothing with pin_memory false"),
    ({"prefetch": 5, "num_layer_buffers": 3}, "in two ways"), ({"prefetch": -1}, "prefetch is -1"),
    ({"buffer_mib": 0.0}, "buffer_mib is 0.0"),
])  # fmt: skip
def test_settings_of_travelling_weights_are_checked(asked, words):
    refused(ValueError, words, lambda: InferSettings(**asked))


@pytest.mark.parametrize("asked", [{"prefetch": 1}, {"num_layer_buffers": 2}, {"buffer_mib": 4.0}])
def test_what_does_nothing_where_no_weight_travels_is_refused(tiny_folder, asked):
    with pytest.raises(ValueError, match=f"{next(iter(asked))} does nothing: all weights live in RAM"):
        open_engine(str(tiny_folder[0]), InferSettings(**asked))


def test_memory_of_rows_is_given_back_before_its_pool(tiny_folder, monkeypatch):
    opened = open_engine(str(tiny_folder[0]), InferSettings(device="cpu", ram_gib=1, context=64))
    units, parts = opened.engine.runner.flow.units, opened.placement.parts
    placement = dataclasses.replace(
        opened.placement, parts=tuple(dataclasses.replace(p, is_rows=p.part == "embedding") for p in parts)
    )
    monkeypatch.setattr(weights, "device_view", lambda *args: None)
    with ExitStack() as undo:
        rows = weights.open_rows(units, placement, torch.device("cpu"), undo)
        assert rows is not None and [len(home) for home in rows.values()] == [units.embed.layout.home_bytes]
        monkeypatch.setattr(weights, "device_view", refuse)
        assert weights.open_rows(units, placement, torch.device("cpu"), undo) is None
    opened.close()


def test_rows_that_have_ram_already_take_no_page_locked_memory_from_layers():
    units, asked = discover_units(tiny_loaded("llama")), {}
    ram = SimpleNamespace(which_pinned=lambda sizes: asked.update(sizes) or frozenset())
    first, rows = units.layer_units[0], {units.embed.name: torch.zeros(1, dtype=torch.uint8)}
    memory = weights._PlacedMemory(ram, units.all, [first], torch.device("cuda"), rows)
    memory.which_pinned([(part.index, 8) for part in units.all])
    assert {index for index, size in asked.items() if not size} == {units.embed.index, first.index}


def refuse(*_):
    raise MemoryError("no address")


def test_names_of_deepspeed_mean_the_same():
    words = ["model", "--kv_offload", "cpu", "--prefetch", "1", "--pin_memory", "false", "--buffer_mib", "8"]
    settings = settings_of(generate_flags().parse_args(words))
    assert (settings.kv_home, settings.layer_buffers, settings.staging_bytes) == ("ram", 2, 1)
    assert dataclasses.replace(settings, vram_gib=2.0).layer_buffers == 2
    same = settings_of(generate_flags().parse_args(["model", "--buffer_count", "2", "--kv_offload", "none"]))
    assert same.layer_buffers == 2 and same.kv_home == "vram" and same.staging_bytes is None
    refused(ValueError, "pin_memory does nothing on a CPU", lambda: settings.check_device("cpu"))


def test_one_adapter_and_one_prompt_at_a_time(capsys):
    for flag in ("--adapter", "--prompt"):
        with pytest.raises(SystemExit):
            generate_flags().parse_args(["model", flag, "a", flag, "b"])
        assert f"{flag} is given twice" in capsys.readouterr().err
