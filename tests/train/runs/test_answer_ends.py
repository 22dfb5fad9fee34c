"""A model that learned to end its turns with another token than its base's text stops there in every export."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from outcore.cli import main
from outcore.data import DataSettings, prepare_data
from outcore.infer.opening import open_model
from tests.data.families import tokenizer_of
from tests.data.fixtures import tiny_tokenizer, write_jsonl
from tests.infer.models import save_tiny_model
from tests.train.jobs import fixtures, flags, metrics

corpus, shared, straight, straight_by, in_the_repository = fixtures
CHAT = [{"role": "user", "content": "Say hi"}, {"role": "assistant", "content": "Hi there"}]
LORA = ["--lora_r", "4"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model: EOS <|endoftext|> (0), <|im_end|> (3) only an added token, no chat template; its configuration
    names another EOS than its tokenizer and its generation."""
    folder = tmp_path_factory.mktemp("base")
    model, tokenizer = save_tiny_model(folder)
    model.config.eos_token_id = 5
    model.config.save_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


def trained(root: Path, *extra: str) -> Path:
    """The finished model of a short run over chats."""
    rows = write_jsonl(root / "chats.jsonl", [{"messages": CHAT}] * 64)
    argv = flags(root, rows, "--run_name", "r", "--eval_steps", "0", "--precision", "fp32", *extra)
    assert main(["train", *argv]) == 0
    return root / "export" / "r"


def ends_of(folder: Path) -> Any:
    return GenerationConfig.from_pretrained(folder).eos_token_id


def is_consistent(folder: Path) -> bool:
    return AutoConfig.from_pretrained(folder).eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id == 0


@pytest.mark.parametrize("engine", ["stream", pytest.param("deepspeed", marks=pytest.mark.more)])
def test_every_export_of_a_full_run_stops_where_its_chats_end(tmp_path: Path, base: Path, engine: str, capsys) -> None:
    folder = trained(tmp_path, "--model_name_or_path", str(base), "--max_steps", "2", "--engine", engine)
    assert ends_of(folder) == [0, 3] and is_consistent(folder)
    header = metrics(tmp_path)[0]
    assert header["model"]["end_tokens"] == [0, 3] and header["data"]["end_tokens"] == [3]
    assert "answers end with <|endoftext|> (0) or <|im_end|> (3): the exported generation" in capsys.readouterr().out
    again = tmp_path / "again"
    assert main(["export", str(tmp_path / "checkpoint/r"), "--out", str(again)]) == 0
    assert ends_of(again) == [0, 3] and is_consistent(again)
    opened = open_model(str(tmp_path / "checkpoint/r"), precision="fp32").loaded.model
    assert opened.generation_config.eos_token_id == [0, 3]
    assert main(["export", str(folder), "--gguf", "f16", "--out", str(tmp_path / "m.gguf")]) == 0
    import gguf

    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    written = {name: int(field.parts[-1][0]) for name, field in reader.fields.items() if name.endswith("_token_id")}
    assert written["tokenizer.ggml.eos_token_id"] == 0 and written["tokenizer.ggml.eot_token_id"] == 3


@pytest.mark.parametrize("how", ["merged", "adapter"])
def test_every_export_of_a_lora_run_stops_there(tmp_path: Path, base: Path, how: str) -> None:
    folder = trained(tmp_path, "--model_name_or_path", str(base), "--max_steps", "2", *LORA, "--lora_export", how)
    assert ends_of(folder) == [0, 3]
    assert (folder / "adapter_config.json").is_file() == (how == "adapter")
    checkpoint = str(tmp_path / "checkpoint/r")
    for name, more in (("alone", []), ("merged", ["--merge"])):
        assert main(["export", checkpoint, "--out", str(tmp_path / name), *more]) == 0
        assert ends_of(tmp_path / name) == [0, 3]
    assert is_consistent(tmp_path / "merged")
    for name in (checkpoint, str(tmp_path / "alone")):  # our own commands read what was written
        assert open_model(name, precision="fp32").loaded.model.generation_config.eos_token_id == [0, 3]


def test_the_default_preset_stops_there(tmp_path: Path) -> None:
    folder = trained(tmp_path, "--max_steps", "2")
    assert ends_of(folder) == [0, 3] and is_consistent(folder)


@pytest.mark.parametrize("engine", ["stream", pytest.param("deepspeed", marks=pytest.mark.more)])
def test_generate_and_the_logs_samples_stop_after_the_answer(tmp_path: Path, base: Path, engine: str) -> None:
    how = ["--max_steps", "40", "--learning_rate", "5e-3", "--save_strategy", "no", "--sample_tokens", "40"]
    folder = trained(tmp_path, "--model_name_or_path", str(base), "--engine", engine, *how)
    assert (tmp_path / "log/r/samples.txt").read_text().endswith(">>>Hi there<|im_end|>\n")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**asked, max_new_tokens=40, do_sample=False, pad_token_id=1)[0]
    assert tokenizer.decode(written[asked["input_ids"].shape[1] :]) == "Hi there<|im_end|>"


def test_an_end_of_its_own_is_found_in_the_data_and_by_our_own_commands(tmp_path: Path, base: Path) -> None:
    """No list of known tokens helps here."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<|over|>"], special_tokens=True)
    own = tmp_path / "own"
    loop = "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + '<|over|>\n' }}{% endfor %}"
    tokenizer.chat_template = loop + "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(own)
    tokenizer.save_pretrained(own)
    number = tokenizer.convert_tokens_to_ids("<|over|>")
    folder = trained(tmp_path, "--model_name_or_path", str(own), "--max_steps", "1", *LORA, "--lora_export", "adapter")
    assert ends_of(folder) == [0, number]
    assert number in open_model(str(folder), precision="fp32").end_tokens


ASKED, TOLD = "the quick fox?", "a lazy dog"
TALK = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": TOLD}]
SHAPES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "messages": ({"messages": TALK}, [3]),
    "a question behind the answer": ({"messages": [*TALK, TALK[0]]}, [3]),
    "sharegpt": ({"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": TOLD}]}, [3]),
    "alpaca": ({"instruction": ASKED, "output": TOLD}, [3]),
    "messages in pairs": ({"prompt": TALK[:1], "completion": TALK[1:]}, [3]),
    "preference": ({"chosen": TALK, "rejected": [TALK[0], {"role": "assistant", "content": "no"}]}, [3]),
    "tokens": ({"input_ids": [70, 80, 90, 3]}, [3]),
    "tokens without an end": ({"input_ids": [70, 80, 90]}, []),
    "pairs": ({"prompt": ASKED, "completion": TOLD}, [0]),
    "text": ({"text": ASKED}, []),
}


@pytest.mark.parametrize("on_all", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_of_rows_says_what_its_answers_end_with(tmp_path: Path, shape: str, on_all: bool) -> None:
    row, expected = SHAPES[shape]
    file = write_jsonl(tmp_path / "rows.jsonl", [row] * 4)
    settings = DataSettings(dataset=str(file), cache_dir=str(tmp_path), seq_length=64, train_on_prompt=on_all)
    assert prepare_data(settings, tiny_tokenizer()).summary.end_tokens == expected


@pytest.mark.parametrize(("family", "end"), [
    ("gptoss", "<|return|>"), ("gemma3", "<end_of_turn>"), ("glm4moe", "<|user|>"), ("kimi_k2", "<|im_end|>"),
    ("qwen1_5", "<|im_end|>"), ("zephyr", "</s>"),
])  # fmt: skip
def test_a_published_template_ends_a_conversation_not_a_turn_inside_it(tmp_path: Path, family: str, end: str) -> None:
    """gpt-oss ends answers inside a conversation with <|end|>, which also ends a thought: nothing may stop there."""
    tokenizer = tokenizer_of(family)
    file = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [*TALK, *TALK]}, {"messages": [*TALK, TALK[0]]}])
    settings = DataSettings(dataset=str(file), cache_dir=str(tmp_path), seq_length=512)
    found = prepare_data(settings, tokenizer).summary.end_tokens
    assert tokenizer.convert_ids_to_tokens(found) == [end]
