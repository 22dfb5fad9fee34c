"""Text while tokens arrive: whole letters only, stop texts across tokens."""

import pytest

from outcore.infer.requests import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes; 0 is special."""

    def decode(self, tokens, skip_special_tokens=True):
        return bytes(t for t in tokens if t or not skip_special_tokens).decode("utf-8", errors="replace")


class Pieces:
    """A tokenizer with pieces of text as tokens, which drops the space at the beginning as SentencePiece does."""

    def __init__(self, *pieces: str):
        self.pieces = pieces

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(self.pieces[t] for t in tokens).removeprefix(" ")


def test_letters_come_whole_and_nothing_is_lost():
    text = "Grüße, 世界 🎉!"
    stream = TextStream(Bytes())
    parts = [stream.add([byte]) for byte in text.encode()]
    assert "".join(parts) + stream.finish() == text
    assert all("�" not in part for part in parts)


def test_bytes_that_are_no_letter_come_out_in_the_end():
    stream = TextStream(Bytes())
    parts = [stream.add([0xFF]) for _ in range(20)]
    assert ("".join(parts) + stream.finish()).count("�") == 20


def test_spaces_between_words_stay():
    stream = TextStream(Pieces(" Hello", " world", "!"))
    assert "".join(stream.add([t]) for t in (0, 1, 2)) + stream.finish() == "Hello world!"


def test_a_text_that_goes_on_keeps_the_space_before_its_first_word():
    stream = TextStream(Pieces(" Hello", " world", "!"), (), [0])
    assert stream.add([1]) + stream.add([2]) + stream.finish() == " world!"
    letter = "é".encode()
    stream = TextStream(Bytes(), (), letter[:1])  # a prompt that ends within a letter
    assert stream.add(list(b"abc")) + stream.finish() == "abc"


@pytest.mark.parametrize("cut", range(1, 8))
def test_stop_texts_across_chunk_borders(cut):
    text = b"one STOP two"
    stream = TextStream(Bytes(), ["STOP", "never"])
    said = ""
    for at in range(0, len(text), cut):
        said += stream.add(list(text[at : at + cut]))
    assert said + stream.finish() == "one " and stream.is_stopped and stream.stop == "STOP"


def test_a_stop_text_that_may_not_stop_yet_is_said():
    stream = TextStream(Bytes(), ["STOP"])
    assert stream.add(list(b"a STOP b"), may_stop=False) == "a STOP b"
    assert stream.add(list(b" STOP c")) == " " and stream.is_stopped


def test_what_only_looks_like_a_stop_text_is_said():
    stream = TextStream(Bytes(), ["STOP"])
    assert stream.add(list(b"a ST")) == "a "
    assert stream.add(list(b"EP ST")) == "STEP "
    assert stream.finish() == "ST" and not stream.is_stopped
