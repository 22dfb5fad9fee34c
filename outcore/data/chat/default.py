"""The template of tokenizers that have none: ChatML with tools, tool calls and reasoning, its marks in place. And what
ends an answer, by template and model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outcore.data.basis import DataError
from outcore.model.facts import end_ids

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<turn|>", "<|return|>")
"""Tokens that end a turn of a chat; those that a model's own template names end its answers."""

_CHATML = (
    "{%- set first = 0 -%}{%- if tools -%}{{- '<|im_start|>system\n' -}}"
    "{%- if messages[0]['role'] == 'system' -%}{%- set first = 1 -%}{{- messages[0]['content'] + '\n\n' -}}"
    "{%- endif -%}"
    "{{- 'You may call these functions, described as JSON in <tools></tools>:\n<tools>' -}}"
    "{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}"
    '{{- \'\n</tools>\nTo call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.\' -}}'
    "{{- END + '\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages[first:] -%}{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['role'] == 'assistant' -%}{%- generation -%}"
    "{%- if message['reasoning_content'] -%}{{- '<think>\n' + message['reasoning_content'] + '\n</think>\n\n' -}}"
    "{%- endif -%}{{- message['content'] -}}"
    "{%- for call in message['tool_calls'] or [] -%}{%- set function = call['function'] or call -%}"
    "{{- ('\n' if message['content'] or not loop.first else '') + '<tool_call>{\"name\": ' -}}"
    "{{- (function['name'] | tojson) + ', \"arguments\": ' + (function['arguments'] | tojson) + '}</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- END -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + END -}}{%- endif -%}{{- '\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def default_template(tokenizer: Any) -> str:
    """ChatML, its turns ended by <|im_end|> where the tokenizer has that token, by its own EOS token otherwise."""
    knows_chatml = tokenizer.convert_tokens_to_ids("<|im_end|>") not in (None, tokenizer.unk_token_id)
    return _CHATML.replace("\n", "\\n").replace("END", "'<|im_end|>'" if knows_chatml else "eos_token")


def ensure_chat_template(tokenizer: Any) -> str | None:
    """Gives a tokenizer without chat template the default one; returns what to tell, None if it had one."""
    if tokenizer.chat_template:
        return None
    tokenizer.chat_template = default_template(tokenizer)
    end = "<|im_end|>" if "'<|im_end|>'" in tokenizer.chat_template else tokenizer.eos_token
    return f"the tokenizer has no chat template: conversations are written as ChatML, each turn ended by {end}"


def read_template(name: str) -> str:
    """The chat template in a file. DataError when it is none."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template as compiled

    file = Path(name).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        compiled(text)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--chat_template {file}: cannot be read: {error}.") from error
    except TemplateSyntaxError as error:
        where = f"{file}, line {error.lineno}"
        raise DataError(f"--chat_template {where}: not a Jinja template: {error.message}.") from error
    if "messages" not in text:
        raise DataError(f"--chat_template {file}: says nothing of `messages`, which a chat template goes through.")
    return text


def end_tokens_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer, by the generation config of `model`, its tokenizer and its chat template."""
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        found |= {*end_ids(getattr(holder, "eos_token_id", None))}
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for text in TURN_ENDS:
        if text in template:
            ids = tokenizer.encode(text, add_special_tokens=False)
            found |= set(ids) if len(ids) == 1 else set()
    return frozenset(found)
