"""Calls of tools, whatever their schemas: where an answer is written by chance in the form of a chat with tools, a call
that has ended holds arguments that the schema allows."""

from __future__ import annotations

import copy
import json
import random

import pytest

from outcore.infer.chats import Chat, style_of
from outcore.infer.requests import Prompts

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}
PAIRS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '' }}<tool_call>\n"
    "<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Arguments one by one, as Qwen's coders write them."""
NAMES = ("a", "path", "max_count", "x-y", "täg", "end", "type")
FEW = {"type": "integer", "minimum": 0, "maximum": 5}
SHARED = {"type": "object", "properties": {"n": FEW}, "required": ["n"]}
OTHERS = [
    {"type": ["string", "null"]}, {"type": "number", "exclusiveMinimum": -9, "exclusiveMaximum": 40},
    {"type": "string", "format": "date"}, {"type": "string", "format": "uuid"}, FEW | {"multipleOf": 5, "default": 5},
    {"$ref": "#/$defs/shared"}, {"anyOf": [{"$ref": "#/$defs/shared"}, {"type": "null"}]},
    {"oneOf": [FEW, {"type": "string", "maxLength": 3}]}, {"allOf": [SHARED, {"properties": {"b": {"type": "null"}}}]},
    {"type": "object", "additionalProperties": FEW},
    {"type": "object", "patternProperties": {"^x[0-9]$": FEW}, "additionalProperties": False},
    {"type": "array", "prefixItems": [FEW, {"type": "boolean"}], "items": False, "minItems": 2},
]  # fmt: skip
"""Schemas with keywords that are met less often."""


def some_schema(draw: random.Random, depth: int = 0) -> dict:
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "other", "other"]
    kinds += ["array", "object", "anyOf", "null", "strings"] if depth < 2 else []
    kind = draw.choice(kinds)
    if kind == "object":
        return some_object(draw, depth + 1)
    if kind == "array":
        least = draw.randint(0, 2)
        return {"type": "array", "items": some_schema(draw, depth + 1), "minItems": least, "maxItems": least + 2}
    if kind == "anyOf":
        return {"anyOf": [some_schema(draw, depth + 1) for _ in range(2)]}
    if kind == "other":
        return draw.choice(OTHERS)
    if kind == "enum":
        return {"enum": draw.sample(["on", "off", "ö\n", 3, None, True, 'q"'], 3)}
    if kind == "const":
        return {"const": draw.choice(["fixed", 7, False])}
    if kind == "strings":
        return {"type": "string", "enum": ["north", "south", "a b"]}
    if kind == "string":
        found = {"type": "string"}
        return found | draw.choice([{"maxLength": 6}, {"minLength": 2, "maxLength": 8}, {"pattern": "^[a-c]{1,3}$"}])
    if kind in ("integer", "number"):
        low = draw.randint(-20, 20)
        return {"type": kind, "minimum": low, "maximum": low + draw.randint(0, 900)}
    return {"type": kind}


def some_object(draw: random.Random, depth: int = 0) -> dict:
    names = draw.sample(NAMES, draw.randint(0, 4))
    found = {"type": "object", "properties": {name: some_schema(draw, depth) for name in names}}
    found["required"] = [name for name in names if draw.random() < 0.6]
    found |= {} if depth else {"$defs": {"shared": SHARED}}
    return found | ({"additionalProperties": False} if draw.random() < 0.8 else {})


def written(draw: random.Random, matcher, tokenizer, begins: str) -> str:
    """An answer drawn token by token among those that the form allows; short ones first, so that it ends."""
    import torch

    ids = list(tokenizer(begins, add_special_tokens=False)["input_ids"])
    assert matcher.count_allowed(ids) == len(ids)
    for token in ids:
        matcher.take(token)
    while not matcher.is_complete and len(ids) < 700:
        matcher.begin()
        bits = matcher.mask(0)
        allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().nonzero()[:, 0].tolist()
        if tokenizer.eos_token_id in allowed:
            break
        ends = [token for token in allowed if tokenizer.decode([token])[:1] in '"}],<\n']
        token = draw.choice(ends if ends and draw.random() < 0.5 else allowed)
        matcher.take(token)
        ids.append(token)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def models(tiny_folder):
    """What reads chats of two models, by how they write calls; their forms."""
    from outcore.infer.requests import Grammars

    found = []
    for template in (None, PAIRS):
        tokenizer = copy.deepcopy(tiny_folder[2])
        tokenizer.chat_template = template or tokenizer.chat_template
        found.append((Prompts(tokenizer), Grammars(tokenizer, frozenset({tokenizer.eos_token_id}))))
        assert (style_of(found[-1][0]).pairs is None) == (template is None)
    return found


def check(seed: int, models) -> bool:
    """One chat with some tools; whether a call has ended in it."""
    draw = random.Random(seed)
    prompts, grammars = models[seed % 2]
    tools = [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": some_object(draw)}}
        for name in draw.sample(["look", "look_up", "do.it", "mcp__x__y"], draw.randint(1, 3))
    ]
    more = {"tools": tools, "parallel_tool_calls": draw.random() < 0.5}
    more |= {"tool_choice": "required"} if draw.random() < 0.3 else {}
    chat = Chat(prompts, ASKED | more)
    form = grammars.of(*chat.form)
    begins = "" if "tool_choice" in more else draw.choice(["", "So. "]) + "<tool_call>"
    text = written(draw, form.matcher(), prompts.tokenizer, begins)
    step = draw.choice([1, 5, len(text)])
    parser = chat.parser("r")
    for at in range(0, len(text), step):
        parser.add(text[at : at + step])
    parser.finish()
    said = parser.whole
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    ended = said.tool_calls[: -1 if said.is_cut else None]
    for call in ended:
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, schemas[call["function"]["name"]])
    assert said.content in ("", "So. ") or not ended, (seed, text)
    return bool(ended)


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 1200), marks=pytest.mark.more)], ids=str)
def test_every_call_that_has_ended_is_valid(models, seeds):
    ended = sum(check(seed, models) for seed in seeds)
    assert ended > len(seeds) * 0.7, "most of them end"
