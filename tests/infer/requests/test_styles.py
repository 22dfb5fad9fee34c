"""How families write thoughts and calls: learned from the template, allowed by the form, read as it was written."""

from __future__ import annotations

import copy
import json
import time

import pytest

from outcore.infer.chats import AnswerParser, Chat, Reads, style_of
from outcore.infer.requests import Grammars, Prompts

BEGIN = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
END = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}"
NAME, ARGS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
LATER = "{% if not loop.first %}BETWEEN{% endif %}"
PAIRS = "{% for k, v in c.function.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"


def template(begins, call, ends="", between=""):
    """A chat template with calls written so."""
    calls = CALLS + LATER.replace("BETWEEN", between) + call + "{% endfor %}"
    return BEGIN + TURN + "{% if m.tool_calls %}" + begins + calls + ends + "{% endif %}<|im_end|>\n" + END


def raises(when):
    return "{% if " + when + " %}{{ raise_exception('no') }}{% endif %}"


DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
FAMILIES = {  # as published, but for the turns around
    "hermes, qwen, smollm": template(
        "", f'<tool_call>\n{{"name": "{NAME}", "arguments": {ARGS}}}\n</tool_call>', between="\n"
    ),
    "llama 3": template(raises("m.tool_calls | length != 1"), f'{{"name": "{NAME}", "parameters": {ARGS}}}'),
    "mistral 3": template(
        "[TOOL_CALLS] [",
        raises("c.id | length != 9") + f'{{"name": "{NAME}", "arguments": {ARGS}, "id": "{{{{ c.id }}}}"}}', "]", ", ",
    ),
    "mistral 11": template("", f"[TOOL_CALLS]{NAME}[ARGS]{ARGS}"),
    "deepseek 3.1": template(
        DEEPSEEK[0], f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGS}<｜tool▁call▁end｜>", DEEPSEEK[1]
    ),
    "deepseek 3": template(
        DEEPSEEK[0],
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{ARGS}\n```<｜tool▁call▁end｜>",
        DEEPSEEK[1], "\n",
    ),
    "kimi": template(
        "<|tool_calls_section_begin|>",
        f"<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{ARGS}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "phi, granite": template(
        "<|tool_call|>[", f'{{"name": "{NAME}", "arguments": {ARGS}}}', "]<|/tool_call|>", ", "
    ),
    "qwen 3.5": template(
        "",
        f"<tool_call>\n<function={NAME}>\n{PAIRS}<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>", between="\n",
    ),
    "glm": template(
        "",
        f"\n<tool_call>{NAME}\n{PAIRS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n"
        "{% endfor %}</tool_call>",
    ),
    "minimax": template(
        "\n<minimax:tool_call>\n",
        f'<invoke name="{NAME}">\n{PAIRS}<parameter name="{{{{ k }}}}">{VALUE}</parameter>\n'
        "{% endfor %}</invoke>\n", "</minimax:tool_call>",
    ),
}  # fmt: skip
SPECIAL = {
    "mistral 3": ["[TOOL_CALLS]"], "mistral 11": ["[TOOL_CALLS]", "[ARGS]"],
    "qwen 3.5": ["<tool_call>", "</tool_call>"],
    "kimi": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
             "<|tool_calls_section_end|>"],
}  # fmt: skip
SCHEMA = {
    "type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}, "required": ["path"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("look", "look_up")
]
GIVEN = [{"path": 'a "b"\n<c>', "n": 3}, {"path": "ö"}]


def with_template(tokenizer, template, special=()):
    found = copy.deepcopy(tokenizer)
    found.chat_template = template
    found.add_special_tokens({"additional_special_tokens": list(special)})
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_written_and_read_as_the_template_writes_them(tiny_folder, family):
    pytest.importorskip("llguidance")
    tokenizer = with_template(tiny_folder[2], FAMILIES[family], SPECIAL.get(family, ()))
    prompts, user = Prompts(tokenizer), {"role": "user", "content": "Hi"}
    several = family != "llama 3"
    names = ("look", "look_up")[: 1 + several]
    ids = ["abcdefgh0", "abcdefgh1"] if "mistral" in family else [f"functions.{n}:{i}" for i, n in enumerate(names)]
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for number, name, given in zip(ids, names, GIVEN, strict=False)
    ]
    asked = prompts.of_chat([user], TOOLS)[0]
    text = prompts.of_chat([user, {"role": "assistant", "content": "", "tool_calls": calls}, user], TOOLS)[0]
    said = text[len(asked) :].partition("<|im_end|>" if "<|im_end|>" in text[len(asked) :] else "<|im_start|>")[0]
    chat = Chat(prompts, {"messages": [user], "tools": TOOLS})
    form = Grammars(tokenizer, frozenset({tokenizer.eos_token_id})).of(*chat.form)
    tokens = tokenizer(said, add_special_tokens=False)["input_ids"]
    assert form is not None and form.matcher().count_allowed(tokens) == len(tokens), (style_of(prompts), said)
    bad = tokenizer(said.replace("look", "gone"), add_special_tokens=False)["input_ids"]
    assert form.matcher().count_allowed(bad) < len(bad)
    for step in (1, 4, len(said)):
        parser = chat.parser("r")
        for at in range(0, len(said), step):
            parser.add(said[at : at + step])
        parser.finish()
        found = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parser.whole.tool_calls]
        assert found == list(zip(names, GIVEN, strict=False)) and not parser.whole.content.strip()
        assert not parser.whole.is_cut
    assert chat.keeps_special == (family in SPECIAL)
    chat = Chat(prompts, {"messages": [user], "tools": TOOLS, "parallel_tool_calls": False})
    form = Grammars(tokenizer, frozenset({tokenizer.eos_token_id})).of(*chat.form)
    assert form is not None and (form.matcher().count_allowed(tokens) == len(tokens)) is not several
    assert [call["function"]["name"] for call in chat.parts_of("r", said).tool_calls] == ["look"]


CHANNELS = (
    "{% for t in tools or [] %}T{% endfor %}{{ messages[0].content }}{# <|channel|>analysis<|message|>{}<|end|> #}"
)
CHANNEL_MARKS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>"]


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_answers_in_channels(tiny_folder, step):
    """As gpt-oss writes them: a thought, words beside the call, the call; or the answer."""
    pytest.importorskip("llguidance")
    tokenizer = with_template(tiny_folder[2], CHANNELS, CHANNEL_MARKS)
    chat = Chat(Prompts(tokenizer), {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS})
    form = Grammars(tokenizer, frozenset({tokenizer.eos_token_id})).of(*chat.form)
    turn = "<|end|><|start|>assistant"
    thought = "<|channel|>analysis<|message|>so" + turn
    aloud = "<|channel|>commentary<|message|>I look." + turn
    call = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"path": "a"}'
    for text, content, count in (
        (thought + aloud + call, "I look.", 1),
        ("<|channel|>final<|message|>Yes.", "Yes.", 0),
    ):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert form is not None and form.matcher().count_allowed(tokens) == len(tokens)
        parser = chat.parser("r")
        for at in range(0, len(text), step):
            parser.add(text[at : at + step])
        parser.finish()
        assert parser.whole.content == content and parser.whole.reasoning == ("so" if count else "")
        assert [json.loads(c["function"]["arguments"]) for c in parser.whole.tool_calls] == [{"path": "a"}] * count
    bad = tokenizer(call.replace('"path"', '"n"'), add_special_tokens=False)["input_ids"]
    assert form.matcher().count_allowed(bad) < len(bad) and chat.keeps_special


THOUGHTS = {
    "qwen, deepseek, glm, kimi, minimax, nemotron, smollm, phi": ("<think>\nso</think>\n\n", "<think></think>"),
    "mistral": ("[THINK]so[/THINK]", "[THINK]{}[/THINK]"),
    "gpt-oss": (
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>analysis<|message|>{}<|end|>",
    ),
    "gemma": ("<|channel>thought\nso<channel|>", "<|channel>thought\n{}<channel|>"),
    "seed": ("<seed:think>so</seed:think>", "<seed:think></seed:think>"),
    "exaone": ("<thought>\nso\n</thought>\n\n", "<thought></thought>"),
}  # fmt: skip


@pytest.mark.parametrize("family", THOUGHTS)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_what_is_thought_is_told_apart(tiny_folder, family, step):
    said, shown = THOUGHTS[family]
    prompts = Prompts(with_template(tiny_folder[2], "{{ messages[0].content }}{# " + shown + " #}"))
    parser, text = Chat(prompts, {"messages": [{"role": "user", "content": "Hi"}]}).parser("r"), said + "Yes."
    for at in range(0, len(text), step):
        parser.add(text[at : at + step])
    parser.finish()
    assert parser.whole.content == "Yes." and parser.whole.reasoning.strip() == "so"


def test_without_marks_all_is_text():
    parser = AnswerParser("r", Reads())
    parser.add("<think>a</think><tool_call>b")
    parser.finish()
    assert parser.whole.content == "<think>a</think><tool_call>b"


@pytest.mark.parametrize("family", FAMILIES)
def test_blanks_where_a_call_should_begin_take_no_time(tiny_folder, family):
    tokenizer = with_template(tiny_folder[2], FAMILIES[family], SPECIAL.get(family, ()))
    chat = Chat(Prompts(tokenizer), {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS})
    parser, began_s = chat.parser("r"), time.thread_time()
    parser.add(style_of(Prompts(tokenizer)).trigger + " " * 100_000)
    parser.finish()
    assert time.thread_time() - began_s < 1


def test_definitions_do_not_pile_up_argument_by_argument(tiny_folder):
    prompts = Prompts(with_template(tiny_folder[2], FAMILIES["qwen 3.5"], SPECIAL["qwen 3.5"]))
    schema = {
        "type": "object",
        "properties": {f"a{number}": {"$ref": "#/$defs/x"} for number in range(3000)},
        "$defs": {"x": {"type": "integer", "description": "x" * 5000}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(ValueError, match="letters"):
        Chat(prompts, {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]})


def test_names_made_of_marks_are_gone_through_once(tiny_folder):
    special = [f"<|mark_{number}|>" for number in range(50)]
    prompts = Prompts(with_template(tiny_folder[2], FAMILIES["hermes, qwen, smollm"], special))
    tool = {"type": "function", "function": {"name": special[7] * 20_000, "parameters": {"type": "object"}}}
    began_s = time.thread_time()
    chat = Chat(prompts, {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]})
    assert time.thread_time() - began_s < 5 and chat.form[0]["type"] == "grammar"


@pytest.mark.parametrize("odd", [{"enum": 5}, {"pattern": 5}, {"minLength": "0"}, {"maxLength": [1]}])
def test_odd_keywords_of_a_text_are_no_texts(tiny_folder, odd):
    prompts = Prompts(with_template(tiny_folder[2], FAMILIES["qwen 3.5"], SPECIAL["qwen 3.5"]))
    schema = {"type": "object", "properties": {"path": {"type": "string", **odd}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    chat = Chat(prompts, {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]})
    with pytest.raises(ValueError, match="tools"):
        Grammars(prompts.tokenizer, frozenset({prompts.tokenizer.eos_token_id})).of(*chat.form)


@pytest.mark.parametrize("step", [1, 2, 100])
def test_a_text_of_its_own_grammar_begins_behind_the_styles_blanks(tiny_folder, step):
    """In pieces it kept the style's blank before it, which a patch may not begin with."""
    prompts = Prompts(with_template(tiny_folder[2], FAMILIES["hermes, qwen, smollm"]))
    style = style_of(prompts)
    assert style is not None and style.between.endswith(" ")
    for text in ("*** Begin Patch\n", " *** two blanks"):
        parser = AnswerParser("r", Reads(style=style, raw=frozenset({"patch"})))
        said = f"{style.open}patch{style.between}{text}{style.close}"
        for at in range(0, len(said), step):
            parser.add(said[at : at + step])
        parser.finish()
        assert [call["function"]["arguments"] for call in parser.whole.tool_calls] == [text]
