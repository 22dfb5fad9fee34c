"""Log-probabilities in OpenAI's shapes."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outcore.infer.commands.logprobs import CompletionLogprobs, of_chat, of_completion
from outcore.infer.passes import TokenScore
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
    told = CompletionLogprobs(tokenizer, prompt)
    both = told.echo([(token, None) for token in prompt]), told.of([Chosen(token, -1.0) for token in answer])
    assert "".join(piece for part in both for piece in part["tokens"]) == "a a a"
    assert [place for part in both for place in part["text_offset"]] == [0, 1, 2, 3, 4]
    assert of_completion(tokenizer, [Chosen(token, -1.0) for token in answer])["tokens"] == [" ", "a"]


@pytest.mark.parametrize("made", [byte_level, with_byte_pieces])
def test_places_count_letters_of_the_text_not_pieces_of_letters(made):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made())
    prompt, answer = tokenizer.encode("a\u4e16\U0001f389 "), tokenizer.encode("\u4e16a")
    for step in (1, 2, len(answer)):
        told = CompletionLogprobs(tokenizer, prompt)
        echo = told.echo([(token, None if not n else TokenScore(-1.0, ())) for n, token in enumerate(prompt)])
        parts = [told.of([Chosen(t, -2.0) for t in answer[at : at + step]]) for at in range(0, len(answer), step)]
        assert echo["text_offset"] == [0, 1, 1, 1, 2, 2, 2, 2, 3]
        assert [place for part in parts for place in part["text_offset"]] == [4, 4, 4, 5]
        assert echo["tokens"][1:4] == ["bytes:\\xe4", "bytes:\\xb8", "bytes:\\x96"]
        assert echo["top_logprobs"][:2] == [None, {"bytes:\\xe4": -1.0}]


def test_a_prompt_that_ends_within_a_letter_is_counted_as_it_reads():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    prompt = tokenizer.encode("a\u4e16")[:-1]
    told = CompletionLogprobs(tokenizer, prompt)
    assert told.echo([(token, None) for token in prompt])["text_offset"] == [0, 1, 1]
    assert told.of([Chosen(prompt[0], -1.0)])["text_offset"] == [len(tokenizer.decode(prompt))] == [2]


def test_the_drawn_token_is_among_the_likeliest_once():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    a, b = tokenizer.encode("ab")
    tops = [((a, -0.1),), ((b, -0.5),), ()]
    told = of_completion(tokenizer, [Chosen(a, -0.1, tops[0]), Chosen(a, -2.0, tops[1]), Chosen(a, -0.3, tops[2])])
    assert told["top_logprobs"] == [{"a": -0.1}, {"b": -0.5, "a": -2.0}, {"a": -0.3}]
    pieces = PreTrainedTokenizerFast(tokenizer_object=with_byte_pieces())
    letter, byte = pieces.convert_tokens_to_ids(["a", "<0x61>"])
    told = of_completion(pieces, [Chosen(byte, -3.0, ((letter, -0.1), (byte, -3.0)))])
    assert told["top_logprobs"] == [{"a": -0.1}], "of two that read alike the likelier"


def test_a_start_token_that_the_tokenizer_adds_is_no_letter_of_the_prompt():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>")
    ids = [tokenizer.bos_token_id, *tokenizer.encode("ab")]
    told = CompletionLogprobs(tokenizer, ids)
    assert told.echo([(token, None) for token in ids], added=1)["text_offset"] == [0, 0, 1]
    assert told.of([Chosen(ids[1], -1.0)])["text_offset"] == [2]
