"""Rows with pictures: read, bounded, put in their places; bad ones are named; answers alone bear the loss."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from PIL import Image

from outcore.data import DataError, DataSettings
from outcore.data.pictures import (
    PictureEncoder,
    PictureError,
    PictureLimits,
    conversation_of,
    load_processor,
    picture_of,
    picture_rows,
)
from tests import tiny_vision
from tests.tiny_vision import TOKENS, picture

ASKED = {"prompt": "What color?", "completion": "red"}
TOOLS = {"prompt": [{"role": "user", "content": "hi"}], "completion": "red", "tools": [{"name": "look"}]}


def rows_of(tmp_path: Path, *rows: dict[str, Any], said: list[str] | None = None, **settings: Any) -> list[Any]:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "red.png").write_bytes(picture())
    (tmp_path / "blue.png").write_bytes(picture("blue"))
    return picture_rows(DataSettings(**settings), str(file), (said if said is not None else []).append)


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


# ---------------------------------------------------------------- one picture


def first_of(found: Any) -> Any:
    return found.pixels.getpixel((0, 0))


def test_a_picture_stands_upright_in_rgb_whatever_it_was():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = picture_of(picture("red", (40, 30), "JPEG", exif=exif)).pixels
    assert turned.size == (30, 40) and turned.mode == "RGB"
    assert first_of(picture_of(picture((0, 255, 255, 0), mode="CMYK", kind="JPEG")))[0] > 240
    assert picture_of(picture((9, 9, 9, 0), mode="RGBA")).pixels.getpixel((0, 0)) == (255, 255, 255)
    assert picture_of(picture(65535 // 2, mode="I;16")).pixels.getpixel((0, 0)) == (127, 127, 127)
    assert picture_of({"bytes": picture(), "path": None}).pixels.size == (40, 30)
    assert picture_of(url_of(picture())).pixels.getpixel((0, 0)) == (255, 0, 0)


def test_of_an_animation_the_first_frame_is_taken_and_said():
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    found = picture_of(file.getvalue())
    assert found.said == "the first of 3 frames" and first_of(found)[0] > 200


def _png_of(width: int, height: int, body: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _tiff(place: int, value: int) -> bytes:
    data = bytearray(picture("red", (8, 8), "TIFF"))
    data[place] = value
    return bytes(data)


BAD = {
    "bomb of pixels": (_png_of(50_000, 50_000, zlib.compress(b"\0" * 1000)), "more than 64 million"),
    "a smaller bomb": (_png_of(9_000, 9_000, zlib.compress(b"\0" * 1000)), "9,000 x 9,000 pixels, more than 64"),
    "as thin as a line": (_png_of(60_000, 1, zlib.compress(b"\0" * 1000)), "no side may be"),
    "cut off": (picture("red", (300, 300), "JPEG")[:700], "damaged or cut off"),
    "cut off png": (picture(size=(300, 300))[:90], "damaged or cut off"),
    "short rows": (_png_of(90, 90, zlib.compress(b"\0" * 20)), "damaged or cut off"),
    "damaged body": (_png_of(90, 90, b"\x78\x9cxxxxxxxx"), "damaged or cut off"),
    "empty": (b"", "empty"),
    "text": (b"hello, this is no picture", "not a picture"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "not a picture"),
    "null": (None, "found NoneType"),
    "number": (7, "found int"),
    "no base64": ("data:image/png;base64,####", "not base64"),
    "url of text": ("data:text/html,<b>x</b>", "should be data:image/png;base64"),
    "address": ("https://example.org/cat.png", "not fetched from the network"),
    "a path from a stranger": ("/etc/passwd", "a path is not opened here"),
    "a file's address": ("file:///etc/passwd", "a path is not opened here"),
    "object": ({"file_id": "x"}, "without 'bytes', 'path' or 'url'"),
    "object in object": ({"url": {"url": "x"}}, "without 'bytes', 'path' or 'url'"),
    "bytes in bytes": ({"bytes": {"bytes": {"url": "x"}}}, "without 'bytes', 'path' or 'url'"),
    "mutated tag": (_tiff(72, 2), "damaged or cut off"),
    "many bytes": (b"\0" * 2000, "more than"),
}  # fmt: skip


@pytest.mark.parametrize("which", BAD)
def test_bad_pictures_are_refused_in_words(which):
    value, words = BAD[which]
    limits = PictureLimits(max_bytes=1000) if which == "many bytes" else PictureLimits()
    with pytest.raises(PictureError, match=words):
        picture_of(value, None, limits)


@pytest.mark.parametrize("path", ["~nosuchuser/a.png", "~a\0/a.png", "a\0.png"])
def test_a_path_that_leads_nowhere_is_refused_in_words(path, tmp_path):
    with pytest.raises(PictureError, match=r"cannot be read|there is no file"):
        picture_of(path, tmp_path)


def test_the_pictures_of_a_row_are_bounded_together():
    talk, cut_off = [{"role": "user", "content": "hello"}], _png_of(40, 30)
    assert len(conversation_of(talk, [picture()] * 2, None, PictureLimits(max_pixels=2400)).pictures) == 2
    with pytest.raises(PictureError, match="picture 3: the picture has 40 x 30 pixels, more than 0 million"):
        conversation_of(talk, [picture()] * 2 + [cut_off], None, PictureLimits(max_pixels=2400))


# ---------------------------------------------------------------- rows


def test_pictures_stand_where_the_row_says_or_before_the_question(tmp_path):
    part = [{"type": "text", "text": "Left "}, {"type": "image"}, {"type": "text", "text": "or right?"}]
    rows = rows_of(
        tmp_path,
        {**ASKED, "images": ["red.png", "blue.png"]},
        {**ASKED, "prompt": "<image> is a, <image> is b", "image": ["red.png", "blue.png"]},
    )
    kinds = [[part["type"] for part in row.conversation().messages[0]["content"]] for row in rows]
    assert kinds == [["image", "image", "text"], ["image", "text", "image", "text"]]
    own = {"type": "image_url", "image_url": {"url": url_of(picture("blue"))}}
    talk = [{"role": "user", "content": [*part, own]}, {"role": "assistant", "content": "right"}]
    (row,) = rows_of(tmp_path, {"messages": talk, "images": ["red.png"]})
    found = row.conversation()
    assert [p.getpixel((0, 0)) for p in found.pictures] == [(255, 0, 0), (0, 0, 255)]
    assert [part["type"] for part in found.messages[0]["content"]] == ["text", "image", "text", "image"]


def test_a_parquet_cell_as_datasets_write_it(tmp_path):
    cells = [[{"bytes": picture(), "path": "a.png"}], [{"bytes": picture("blue"), "path": None}]]
    table = pyarrow.table({"images": cells, "prompt": ["a", "b"], "completion": ["c", "d"]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    rows = picture_rows(DataSettings(), str(tmp_path / "rows.parquet"), print)
    assert [row.conversation().pictures[0].getpixel((0, 0)) for row in rows] == [(255, 0, 0), (0, 0, 255)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**ASKED, "images": ["gone.png"]}, "there is no file"),
        ({**ASKED, "prompt": "<image> and <image>?", "images": ["red.png"]}, "2 places for pictures, and there is 1"),
        ({**ASKED, "prompt": "<image>?", "images": ["red.png", "red.png"]}, "1 place for pictures, and there are 2"),
        ({**ASKED, "prompt": "<image>?"}, "1 place for pictures, and there are 0 pictures"),
        ({**ASKED, "images": ["red.png"] * 65}, "65 pictures, more than 64"),
        ({**ASKED, "image": "red.png", "images": ["blue.png"]}, "column 'image' holds media"),
        ({**TOOLS, "images": ["red.png"]}, "tools and chat_template_kwargs are not read"),
        ({"text": "a text", "images": ["red.png"]}, "questions and answers, or messages"),
    ],
)
def test_a_bad_row_is_named_or_left_out_and_counted(tmp_path, row, words):
    good = {**ASKED, "images": ["red.png"]} if "text" not in row else {"text": "more"}
    with pytest.raises(DataError, match=rf"line 2: .*{words}|line 1: .*{words}"):
        rows_of(tmp_path, good, row)
    if "text" not in row:
        said: list[str] = []
        assert len(rows_of(tmp_path, good, row, said=said, on_bad_row="skip")) == 1
        assert said[0].startswith("left out: 1 row (") and "line 2" in said[0]


# ---------------------------------------------------------------- encoded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vision.save(tmp_path_factory.mktemp("model"))


def test_answers_alone_bear_loss_and_no_placeholder_does(folder, monkeypatch, tmp_path):
    processor = load_processor(str(folder))
    place = processor.tokenizer.convert_tokens_to_ids("<picture>")
    talk = [
        {"role": "user", "content": "hello <image>"}, {"role": "assistant", "content": "world"},
        {"role": "user", "content": "test <image>"}, {"role": "assistant", "content": "numbers"},
    ]  # fmt: skip
    both, one = {"messages": talk, "images": ["red.png", "blue.png"]}, {"messages": talk[:2], "image": "red.png"}
    rows = rows_of(tmp_path, both, one)
    encoder, call, calls = PictureEncoder(processor, [place]), type(processor).__call__, list[int]()
    monkeypatch.setattr(type(processor), "__call__", lambda *a, **k: calls.append(len(k["text"])) or call(*a, **k))
    batch = encoder.batch([row.conversation() for row in rows], [(), ()], [row.where for row in rows])
    assert calls == [2, 4], "one call for the rows, one for all that stands before their answers and behind the first"
    again = encoder.batch([row.conversation() for row in rows[::-1]], [(), ()], [row.where for row in rows[::-1]])
    assert calls == [2, 4, 2] and torch.equal(again["labels"].flip(0), batch["labels"]), "places are known by now"
    told = [{**talk[0], "content": "hello hello <image>"}, talk[1]]
    other = rows_of(tmp_path, {"messages": told, "image": "red.png"})[0]
    labels = encoder.batch([other.conversation()], [()], [other.where])["labels"][0]
    assert calls[3:] == [1, 1] and processor.tokenizer.decode(labels[labels >= 0]) == " world<eos>"
    assert [(ids == place).sum().item() for ids in batch["input_ids"]] == [2 * TOKENS, TOKENS]
    assert batch["pixel_values"].shape[0] == 3
    told = [processor.tokenizer.decode(ids[labels >= 0]) for ids, labels in zip(batch["input_ids"], batch["labels"])]
    assert told == [" world<eos> numbers<eos>", " world<eos>"]
    assert not (torch.isin(batch["labels"], torch.tensor([place, 1]))).any()
    with pytest.raises(DataError, match=r"line 1: .* more than --seq_length 8"):
        PictureEncoder(processor, [place], 8).batch([rows[0].conversation()], [()], [rows[0].where])


def test_a_text_that_spells_the_placeholder_is_refused(folder, tmp_path):
    (row,) = rows_of(tmp_path, {"prompt": "a <picture>", "completion": "b"})
    with pytest.raises(DataError, match="holds <picture>, which stands for a picture"):
        PictureEncoder(load_processor(str(folder)), [0]).batch([row.conversation()], [()], [row.where])


@pytest.mark.parametrize("word", ["<video>", "<sound>", "<soft>"])
def test_words_that_stand_for_more_than_a_picture_are_refused_wherever_they_are(word, folder):
    processor = load_processor(str(folder))
    processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<soft>"]})
    processor.video_token, processor.audio_token = "<video>", "<sound>"
    encoder = PictureEncoder(processor, processor.tokenizer.convert_tokens_to_ids(["<picture>", "<soft>"]))
    said, clean = (conversation_of([{"role": "user", "content": f"<image>{t}"}], [picture()]) for t in (word, "a"))
    with pytest.raises(DataError, match=f"holds {word}, which stands for"):
        encoder.written(said)
    with pytest.raises(DataError, match=f"holds {word}, which stands for"):
        encoder.inputs_of(encoder.written(clean) + word, clean)  # as a tool's description stands there
    assert "pixel_values" in encoder.inputs_of(encoder.written(clean), clean)


def test_places_of_other_kinds_than_a_picture_are_refused(folder):
    processor = load_processor(str(folder))
    processor.return_mm_token_type_ids = True
    processor.video_token_ids = [processor.tokenizer.bos_token_id]  # by a name that says nothing
    encoder = PictureEncoder(processor, processor.tokenizer.convert_tokens_to_ids(["<picture>"]))
    talk = conversation_of([{"role": "user", "content": "<image>a"}], [picture()])
    with pytest.raises(DataError, match="stands for a video or audio"):
        encoder.inputs_of(encoder.written(talk), talk)


def test_a_text_model_takes_no_pictures(tmp_path):
    tiny_vision.processor().tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DataError, match=r"takes no pictures|makes no processor"):
        load_processor(str(tmp_path))


def test_another_processor_that_frames_its_placeholders_encodes_as_well(tmp_path):
    tokenizer = tiny_vision.processor().tokenizer
    for name, token in (("boi_token", "<boi>"), ("eoi_token", "<eoi>"), ("image_token", "<soft>")):
        tokenizer.add_special_tokens({"additional_special_tokens": [token]}, replace_extra_special_tokens=False)
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    pixels = transformers.Gemma3ImageProcessor(size={"height": 28, "width": 28})
    template = tiny_vision.TEMPLATE.replace("<picture>", "<boi>")
    processor = transformers.Gemma3Processor(pixels, tokenizer, chat_template=template, image_seq_length=4)
    rows = rows_of(tmp_path, {**ASKED, "images": ["red.png", "blue.png"]}, {**ASKED, "images": ["red.png"]})
    encoder = PictureEncoder(processor, [tokenizer.image_token_id])
    batch = encoder.batch([row.conversation() for row in rows], [(), ()], [row.where for row in rows])
    is_picture = batch["input_ids"] == tokenizer.image_token_id
    assert is_picture.sum(1).tolist() == [8, 4] and torch.equal(batch["token_type_ids"] == 1, is_picture)
    told = [tokenizer.decode(ids[labels >= 0]) for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)]
    assert [words.strip() for words in told] == ["red<eos>", "red<eos>"]
