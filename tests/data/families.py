"""Chat templates of published models, and for each a small tokenizer with its special tokens, made on the spot.

The templates (tests/data/templates/*.jinja) are facts: the texts that the named model repositories publish, taken from
where templates/README.md says. The tokenizers are ours: a byte-level BPE of 600 tokens to which each
family's special tokens are added, because no model repository can be reached from a test.
"""

import copy
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.data.fixtures import tiny_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
_TOKEN = re.compile(r"<[|｜][^<>\s{}']{1,40}[|｜]>|<\|?[a-z_]{2,30}\|?>|</[a-z_]{2,30}>|\[/?INST\]|<s>|</s>|\[gMASK\]")
_PLAIN = re.compile(r"</?(think|tool_call|tool_response|tools|arg_key|arg_value|function.*|parameter.*|IMPORTANT)>")
"""Tokens that real tokenizers add without making them special, or do not have at all."""


@dataclass(frozen=True)
class Family:
    """One published template."""

    name: str
    source: str
    """Model repository, or family of them, that publishes it."""
    bos: str | None
    eos: str

    @property
    def template(self) -> str:
        """The template's text."""
        return (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")


FAMILIES = {
    family.name: family
    for family in (
        Family("cohere", "CohereLabs/aya-expanse-8b", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
        Family("cohere2", "CohereLabs/tiny-aya-earth", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
        Family("deepseek_r1_distill", "deepseek-ai/DeepSeek-R1-Distill-*", "<｜begin▁of▁sentence｜>",
               "<｜end▁of▁sentence｜>"),
        Family("deepseekv3", "deepseek-ai/DeepSeek-V3", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        Family("gemma", "google/gemma-2-*-it", "<bos>", "<eos>"),
        Family("gemma3", "google/gemma-3-*-it", "<bos>", "<eos>"),
        Family("gemma4_v5", "google/gemma-4-E2B-it", "<bos>", "<eos>"),
        Family("glm4moe", "zai-org/GLM-4.5", None, "<|endoftext|>"),
        Family("gptoss", "openai/gpt-oss-20b", "<|startoftext|>", "<|return|>"),
        Family("lfm2_v2", "LiquidAI/LFM2-1.2B", "<|startoftext|>", "<|im_end|>"),
        Family("llama3", "meta-llama/Meta-Llama-3-8B-Instruct", "<|begin_of_text|>", "<|eot_id|>"),
        Family("llama3_1", "meta-llama/Llama-3.1-8B-Instruct", "<|begin_of_text|>", "<|eot_id|>"),
        Family("llava_next", "llava-hf/llava-v1.6-mistral-7b-hf", "<s>", "</s>"),
        Family("muse_glimmer", "meta-models/Muse-Glimmer-30B", "<|begin_of_text|>", "<|eot|>"),
        Family("nemotron_3_nano", "nvidia/NVIDIA-Nemotron-3-Nano-*", "<s>", "<|im_end|>"),
        Family("nemotron_3_super", "nvidia/NVIDIA-Nemotron-3-Super-*", "<s>", "<|im_end|>"),
        Family("phi3", "microsoft/Phi-3-mini-4k-instruct", "<s>", "<|endoftext|>"),
        Family("qwen2_5", "Qwen/Qwen2.5-7B-Instruct", None, "<|im_end|>"),
        Family("qwen2_5_vl", "Qwen/Qwen2.5-VL-7B-Instruct", None, "<|im_end|>"),
        Family("qwen3", "Qwen/Qwen3-8B", None, "<|im_end|>"),
        Family("qwen3_5_think", "Qwen/Qwen3.5-*", None, "<|im_end|>"),
        Family("qwen3_5_nothink", "Qwen/Qwen3.5-*, thinking off", None, "<|im_end|>"),
        Family("qwen3_6", "Qwen/Qwen3.6-27B", None, "<|im_end|>"),
        Family("qwen3_8", "Qwen/Qwen3.8-27B", None, "<|im_end|>"),
        Family("qwen3_instruct_2507", "Qwen/Qwen3-*-Instruct-2507", None, "<|im_end|>"),
        Family("qwen1_5", "Qwen/Qwen1.5-72B-Chat", None, "<|im_end|>"),
        Family("zephyr", "HuggingFaceH4/zephyr-7b-beta", "<s>", "</s>"),
        Family("mistral_nemo", "mistralai/Mistral-Nemo-Instruct-2407", "<s>", "</s>"),
        Family("deepseek_coder", "deepseek-ai/deepseek-coder-33b-instruct", "<s>", "<|EOT|>"),
        Family("internlm2", "internlm/internlm2-chat-7b", "<s>", "</s>"),
        Family("solar", "upstage/SOLAR-10.7B-Instruct-v1.0", "<s>", "</s>"),
        Family("kimi_k2", "moonshotai/Kimi-K2-Thinking", "[BOS]", "[EOS]"),
        Family("glm_5_1", "zai-org/GLM-5.1", None, "<|endoftext|>"),
        Family("smolvlm", "HuggingFaceTB/SmolVLM-Instruct", "<|im_start|>", "<end_of_utterance>"),
    )
}  # fmt: skip


@functools.cache
def _tokenizer(name: str) -> Any:
    from tokenizers import AddedToken

    family = FAMILIES[name]
    tokenizer = tiny_tokenizer(family.template)
    named = [token for token in (family.bos, family.eos) if token]
    found: list[str] = list(dict.fromkeys([*named, *map(str, _TOKEN.findall(family.template))]))
    tokenizer.add_tokens(
        [AddedToken(token, special=_PLAIN.fullmatch(token) is None, normalized=False) for token in found]
    )
    tokenizer.eos_token = family.eos
    tokenizer.bos_token = family.bos
    tokenizer.name_or_path = family.source
    return tokenizer


def tokenizer_of(name: str) -> Any:
    """A fresh tokenizer with the family's template and special tokens."""
    return copy.deepcopy(_tokenizer(name))
