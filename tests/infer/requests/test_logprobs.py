"""Log-probabilities in OpenAI's shapes."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outcore.infer.commands.logprobs import of_chat, of_completion
from outcore.infer.requests import Chosen

TEXT = "é 世🎉 a�"


def byte_level():
    """Each byte is a token, written as GPT-2 writes it; the space has joined what follows."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "Ġä"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "ä")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_byte_pieces():
    """No letter but "a" and the space is in the vocabulary: the others come as <0xE4>."""
    vocabulary = {"<unk>": 0, "a": 1, "▁": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("made", [byte_level, with_byte_pieces])
def test_bytes_of_tokens_are_those_of_the_text(made):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made())
    ids = tokenizer.encode(TEXT)
    assert len(ids) > len(TEXT)
    told = of_chat(tokenizer, [Chosen(token, -1.0, ((token, -1.0),)) for token in ids])
    for entries in (told["content"], [entry["top_logprobs"][0] for entry in told["content"]]):
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == TEXT.encode()


def test_tokens_of_a_completion_read_as_its_text_does():
    made = with_byte_pieces()  # and, as Llama's, no blank before the first word of a text
    made.decoder = decoders.Sequence([made.decoder, decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    prompt, answer = tokenizer.encode("a a"), tokenizer.encode(" a")
    told = of_completion(tokenizer, [Chosen(token, -1.0) for token in answer], [(token, None) for token in prompt])
    assert "".join(told["tokens"]) == "a a a" and told["text_offset"] == [0, 1, 2, 3, 4]
    assert of_completion(tokenizer, [Chosen(token, -1.0) for token in answer])["tokens"] == [" ", "a"]
