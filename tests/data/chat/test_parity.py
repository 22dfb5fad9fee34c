"""Loss on the same tokens as TRL 1.16's own preparation, but for a short list of differences, each with its reason.

TRL swaps a known template for a marked copy of its own; the tables below name where that copy trains more, or renders
otherwise, than the published template. Everything else must agree token for token and label for label.
"""

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.data import DataSettings
from outcore.data.cache import DocumentEncoder, carries_loss, token_ids
from outcore.data.chat import ChatEncoder
from outcore.data.rows import ChatExample, detect_shape
from outcore.data.sources import RowError
from tests.data.families import FAMILIES, tokenizer_of
from tests.data.generated import TOOLS, conversation, conversations, words
from tests.data.runs import runs

NO_COPY_IN_TRL = {"gemma4_v5", "llama3_1", "qwen1_5", "zephyr", "mistral_nemo", "solar", "kimi_k2"}
NO_COPY_IN_TRL |= {"glm_5_1", "deepseek_coder", "internlm2"}
"""TRL has no training template for these; test_families.py checks them by themselves."""
HEADER_TRAINED = {
    "deepseek_r1_distill": {"<｜Assistant｜>", "<｜tool▁outputs▁end｜>"},
    "deepseekv3": {"<｜Assistant｜>", "<｜tool▁outputs▁end｜>"},
    "gptoss": {"<|start|>assistant"},
    "muse_glimmer": {"<|start|>assistant"},
    "qwen2_5": {"\n"},
}
"""TRL also trains the end of the generation prompt here, which the model is given and never writes."""
THOUGHT_ADDED = {"qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6"}
"""TRL writes (and trains) a reasoning block in every turn; the published template leaves it out of earlier turns, and
that is what the model sees when it runs."""
PARTS_ONLY = {"smolvlm", "llava_next"}
"""Templates of vision models that write no plain text; TRL trains empty turns, so it is given lists of parts here."""
IGNORED_CALLS = "does not write the tool call"
"""The template knows no tool calls: refused here, trained as an empty answer by TRL."""
_THOUGHT = re.compile(r"<think>\n.*?\n</think>\n\n", re.DOTALL)


def theirs_of(tokenizer: Any, template: str, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[int]]:
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=template, tokenize=True, return_dict=True,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    return encoded["input_ids"], encoded["assistant_masks"]


def difference(name: str, tokenizer: Any, ours: tuple, theirs: tuple, pattern: str) -> str:
    """ "" when both agree, or differ as the tables say; otherwise what differs."""
    if ours == theirs:
        return ""
    if name in HEADER_TRAINED and ours[0] == theirs[0]:
        extra = [int(theirs_has and not has) for has, theirs_has in zip(ours[1], theirs[1])]
        lost = [has and not theirs_has for has, theirs_has in zip(ours[1], theirs[1])]
        if not any(lost) and set(runs(tokenizer, ours[0], extra)) <= HEADER_TRAINED[name]:
            return ""
    mine, other = runs(tokenizer, *ours), runs(tokenizer, *theirs)
    if name in THOUGHT_ADDED and len(mine) == len(other):
        without = [(_THOUGHT.sub("", a), _THOUGHT.sub("", b)) for a, b in zip(mine, other)]
        if all(a == b for a, b in without) and (mine[-1] == other[-1] or pattern == "A"):
            return ""
    if name == "glm4moe" and ("UAA" in pattern or "RA" in pattern):
        return ""  # TRL puts <|user|> between two answers in a row; the published template writes nothing there
    return f"{pattern}\n  ours   {mine}\n  theirs {other}"


@pytest.mark.more(after=8)
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - NO_COPY_IN_TRL))
def test_same_tokens_and_labels_as_trl(name: str) -> None:
    tokenizer = tokenizer_of(name)
    template = pytest.importorskip("trl.chat_template_utils").get_training_chat_template(tokenizer)
    encoder, agreed, wrong = ChatEncoder(tokenizer), 0, []
    for pattern, messages, tools in conversations(seed=7, each=2):
        if "E" in pattern:
            continue  # TRL trains the end of an empty answer, here it is not trained
        given = messages
        if name in PARTS_ONLY:
            given = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        if name == "gptoss":  # its word for reasoning, which transformers 5.17 does not put there
            given = [m | {"thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]
        try:
            encoded = encoder.encode(ChatExample(messages, tools))
        except RowError as refused:
            if "refuses this conversation" in str(refused):
                with pytest.raises(Exception):  # noqa: B017  TRL's copy of the template refuses it too
                    theirs_of(tokenizer, template, given, tools)
            elif IGNORED_CALLS not in str(refused) and (name, pattern) != ("deepseekv3", "UCTCTA"):
                wrong.append(f"{pattern}: {refused}")  # DeepSeek-V3 writes a second round of calls without its header
            continue
        ours = (encoded.ids.tolist(), encoded.has_loss.astype(int).tolist())
        if found := difference(name, tokenizer, ours, theirs_of(tokenizer, template, given, tools), pattern):
            wrong.append(found)
        else:
            agreed += 1
    assert not wrong, f"{len(wrong)} of {len(wrong) + agreed}: " + "\n".join(wrong[:3])
    assert agreed >= 8


class Rows:
    """As much of a `datasets.Dataset` as TRL's preparation uses, without its files."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.format = rows, {"type": None}

    @property
    def column_names(self) -> list[str]:
        return list(self.rows[0])

    def __iter__(self):
        return iter(dict(row) for row in self.rows)

    def map(self, change, fn_kwargs=None, remove_columns=None, **_):
        dropped = [remove_columns] if isinstance(remove_columns, str) else remove_columns or []
        rows = [{**row, **change(dict(row), **(fn_kwargs or {}))} for row in self.rows]
        return Rows([{key: value for key, value in row.items() if key not in dropped} for row in rows])


def prepared_by_trl(tokenizer: Any, rows: list[dict[str, Any]], template: str, assistant_only: bool) -> list[dict]:
    """TRL's own `_prepare_dataset`, asked for labels as it makes them for training."""
    from trl.trainer.sft_trainer import SFTTrainer

    trainer: Any = SimpleNamespace(_tokenizer=tokenizer, chat_template=template, completion_only_loss=True)
    args: Any = SimpleNamespace(
        dataset_num_proc=None, dataset_text_field="text", assistant_only_loss=assistant_only, max_length=None,
        shuffle_dataset=False,
    )  # fmt: skip
    return list(SFTTrainer._prepare_dataset(trainer, Rows(rows), tokenizer, args, False, None, "train"))  # type: ignore[arg-type]


def shapes_of(rng: random.Random) -> dict[str, dict[str, Any]]:
    """A row of every shape that TRL knows too."""
    talk = conversation("SUAUA", rng)
    calls = conversation("UCTA", rng)
    said = words(rng)
    return {
        "text": {"text": words(rng)},
        "text with end": {"text": said + "<END>"},
        "prompt_completion": {"prompt": words(rng).strip() + "\n", "completion": words(rng).strip()},
        "completion with end": {"prompt": words(rng).strip() + "\n", "completion": said.strip() + "<END>"},
        "messages": {"messages": talk},
        "messages, tools as text": {"messages": calls, "tools": __import__("json").dumps(TOOLS)},
        "sharegpt": {"conversations": [{"from": m["role"], "value": m["content"]} for m in talk]},
        "prompt and completion of messages": {"prompt": talk[:-1], "completion": talk[-1:]},
        "chat_template_kwargs": {"messages": talk, "chat_template_kwargs": {"enable_thinking": False}},
        "tokens": {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
    }


SHAPE_FAMILIES = (
    "qwen3_instruct_2507", "lfm2_v2", "glm4moe", "cohere", "cohere2", "gemma3", "llama3", "phi3", "qwen2_5_vl",
    "nemotron_3_nano", "nemotron_3_super", "qwen3_8",
)  # fmt: skip
"""Families whose conversations agree with TRL without any entry in the tables above."""
OPENS_THE_THOUGHT = {"nemotron_3_nano", "nemotron_3_super", "qwen3_8"}
"""In a completion of messages TRL leaves out the `<think>` that these generation prompts end with; as messages it
trains it. Here it is trained in both."""


@pytest.mark.more(after=4)
@pytest.mark.parametrize("name", SHAPE_FAMILIES)
def test_same_labels_for_every_shape_that_trl_knows(name: str) -> None:
    tokenizer = tokenizer_of(name)
    template = pytest.importorskip("trl.chat_template_utils").get_training_chat_template(tokenizer)
    rng, agreed = random.Random(3), 0
    for _ in range(3):
        for shape_name, row in shapes_of(rng).items():
            row = {k: v.replace("<END>", tokenizer.eos_token) if isinstance(v, str) else v for k, v in row.items()}
            example = detect_shape([row], DataSettings(), "x").example(row)
            is_talk = isinstance(example, ChatExample)
            try:
                ours = DocumentEncoder(tokenizer).encode(example)
            except RowError as refused:
                assert "tools" in shape_name and ("tool call" in str(refused) or "refuses" in str(refused))
                continue
            theirs = prepared_by_trl(tokenizer, [row], template, assistant_only=is_talk)[0]
            labels = [int(t) if has else -100 for t, has in zip(token_ids(ours), carries_loss(ours))]
            if shape_name == "prompt and completion of messages" and name in OPENS_THE_THOUGHT:
                opened = [i for i, label in enumerate(labels) if label >= 0 > theirs["labels"][i]]
                assert tokenizer.decode([labels[i] for i in opened]).strip() in ("", "<think>")
                labels = [-100 if i in opened else label for i, label in enumerate(labels)]
            assert token_ids(ours).tolist() == theirs["input_ids"], shape_name
            assert labels == theirs["labels"], shape_name
            agreed += 1
    assert agreed >= 24
