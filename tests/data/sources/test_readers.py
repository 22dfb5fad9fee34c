"""Readers: every kind of file, its encodings and its damages, with file and line in what is said."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from outcore.data import DataError, DataSettings
from outcore.data.sources.readers import read_csv, read_json, read_jsonl, read_parquet, read_text
from outcore.data.sources.records import BadRow, BadRows, Record
from outcore.data.sources.source import open_source
from outcore.data.sources.textfile import iterate_text, plain_suffix
from tests.data.fixtures import sentence, write_jsonl
from tests.refused import refused


def rows(records):
    return [item.row for item in records if isinstance(item, Record)]


def problems(records):
    return [str(item.error()) for item in records if isinstance(item, BadRow)]


def test_text_with_bom_crlf_and_blocks(tmp_path: Path):
    path = tmp_path / "my text.txt"
    text = "x" * 4090 + "héllo\r\nwörld\r\n€uro\rend\r"  # the first block ends within it
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    for block_bytes in (1, 2, 3, 5, 1024):
        assert "".join(iterate_text(path, block_bytes)) == "x" * 4090 + "héllo\nwörld\n€uro\nend\n"


@pytest.mark.parametrize("block_bytes", [1, 3, 7, 1 << 20])
def test_invalid_byte_is_reported_with_its_offset(tmp_path: Path, block_bytes: int):
    path = tmp_path / "x.txt"
    for start in ("", "y" * 4092, "y" * 5000):
        path.write_bytes(start.encode() + "añb".encode() + b"\xff" + b"tail")
        with pytest.raises(DataError, match=rf"x\.txt: byte offset {len(start) + 4} \(0xff\) is not UTF-8"):
            list(iterate_text(path, block_bytes))


@pytest.mark.parametrize(("content", "words"), [
    (b"abc\xe2\x82", ["byte offset 3"]), (b"PK\0\0", ["binary file"]),
    ("hello".encode("utf-16"), ["UTF-16, not UTF-8", "iconv"]), ("hello".encode("utf-32"), ["UTF-32, not UTF-8"]),
])  # fmt: skip
def test_text_that_is_none_is_refused_in_words(tmp_path: Path, content: bytes, words: list[str]):
    (tmp_path / "x.txt").write_bytes(content)
    (said,) = problems(read_text(tmp_path / "x.txt"))
    assert all(word in said for word in words)


def test_jsonl_with_every_kind_of_bad_line(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": \n[1]\n"s"\n{"a": "\xff"}\n{"a": 2}')
    records = list(read_jsonl(path))
    assert rows(records) == [{"a": 1}, {"a": 2}]
    said = problems(records)
    assert "line 3: not valid JSON" in said[0] and "column" in said[0]
    assert "line 4: expected an object" in said[1] and "list" in said[1]
    assert "line 5: expected an object" in said[2]
    assert f"line 6: byte offset {path.read_bytes().index(0xFF)} (0xff)" in said[3]


def test_bad_rows_policy():
    from outcore.data.sources.records import Where

    bad = BadRow(Where("f.jsonl", "line", 3), "broken")
    refused(DataError, r"f\.jsonl, line 3: broken.*--on_bad_row skip", lambda: BadRows("error").add(bad))
    counted = BadRows("skip")
    for _ in range(9):
        counted.add(bad)
    assert counted.count == 9 and len(counted.examples) == 5


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed(tmp_path: Path, suffix: str):
    data = b"".join(json.dumps({"n": n, "text": sentence(n)}).encode() + b"\n" for n in range(500))
    path = tmp_path / f"x.jsonl{suffix}"
    if suffix == ".gz":
        path.write_bytes(gzip.compress(data))
    else:
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(data)
    assert plain_suffix(path) == ".jsonl"
    assert [row["n"] for row in rows(read_jsonl(path))] == list(range(500))
    path.write_bytes(path.read_bytes()[:-20])
    refused(DataError, r"x\.jsonl.*(damaged or cut short|cannot be read)", lambda: list(read_jsonl(path)))


def test_csv(tmp_path: Path):
    path = tmp_path / "x.csv"
    path.write_bytes('\ufeffprompt, completion\r\n"a, b","line1\r\nline2"\r\nonly one\r\nc,d\r\n'.encode())
    records = list(read_csv(path))
    assert rows(records) == [{"prompt": "a, b", "completion": "line1\r\nline2"}, {"prompt": "c", "completion": "d"}]
    assert "line 4: 1 fields where the header has 2" in problems(records)[0]


def test_csv_long_fields_tabs_and_bad_bytes(tmp_path: Path):
    (tmp_path / "x.tsv").write_text("a\tb\n" + "x" * 300_000 + "\ty\n")
    assert len(rows(read_csv(tmp_path / "x.tsv"))[0]["a"]) == 300_000
    (tmp_path / "y.csv").write_bytes(b"a,b\n1,2\n\xff,3\n4,5\n")
    records = list(read_csv(tmp_path / "y.csv"))
    assert rows(records) == [{"a": "1", "b": "2"}, {"a": "4", "b": "5"}]
    assert "line 3: byte offset 8" in problems(records)[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [("a;b\n1;2\n", "semicolons"), ("a\tb\n", "tabs"), ("a,a\n1,2\n", "'a' appear more than once")],
)
def test_csv_header_problems(tmp_path: Path, content: str, words: str):
    (tmp_path / "x.csv").write_text(content)
    refused(DataError, words, lambda: list(read_csv(tmp_path / "x.csv")))


def test_json_array_object_and_lines(tmp_path: Path):
    path = tmp_path / "x.json"
    data = [{"n": n, "text": sentence(n, 200)} for n in range(3000)]  # above one block of 1 MiB
    path.write_text(json.dumps(data, indent=1))
    assert path.stat().st_size > 2 << 20
    assert rows(read_json(path)) == data
    path.write_text(json.dumps({"version": 1, "data": data[:3]}))
    assert rows(read_json(path)) == data[:3]
    path.write_text(json.dumps({"text": "one"}))
    assert rows(read_json(path)) == [{"text": "one"}]
    write_jsonl(path, data[:3])
    assert rows(read_json(path)) == data[:3]
    path.write_text('{\n "messages": [{"role": "user", "content": "x"}]\n}')
    assert rows(read_json(path)) == [{"messages": [{"role": "user", "content": "x"}]}]
    path.write_text(" \n")
    assert rows(read_json(path)) == []


def test_json_damages(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text('[{"a": 1},\n{"a": 2},\n3,\n{"a": oops}\n]')
    records = list(read_json(path))
    assert rows(records) == [{"a": 1}, {"a": 2}]
    assert "line 3: expected an object" in problems(records)[0]
    assert "line 4" in problems(records)[1] and "element 4" in problems(records)[1]
    path.write_text('[{"a": 1}, {"a": 2}')
    assert "not closed" in problems(read_json(path))[0]
    path.write_text("17")
    refused(DataError, "expected an array", lambda: list(read_json(path)))
    path.write_text('{"a": \n oops}')
    refused(DataError, "line 2: not valid JSON", lambda: list(read_json(path)))


def test_parquet(tmp_path: Path):
    path = tmp_path / "x.parquet"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    table = pyarrow.table({"messages": [messages] * 2000, "n": list(range(2000))})
    pyarrow.parquet.write_table(table, path)
    found = list(read_parquet(path))
    assert [row["n"] for row in rows(found)] == list(range(2000)) and found[7].row["messages"] == messages
    assert str(found[7].where).endswith("x.parquet, row 8")
    path.write_bytes(path.read_bytes()[:-50])
    refused(DataError, "not a readable parquet file", lambda: list(read_parquet(path)))


def test_folder_is_read_in_order_and_recursively(tmp_path: Path):
    folder = tmp_path / "my folder"
    for name in ("b.txt", "a.md", "sub/c.txt", ".hidden/d.txt", "sub/image.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    source = open_source(DataSettings(dataset=str(folder)))
    assert [row["text"] for row in rows(source.records())] == ["a.md", "b.txt", "sub/c.txt"]
    chosen = open_source(DataSettings(dataset=str(folder), text_extensions=(".txt",)))
    assert [row["text"] for row in rows(chosen.records())] == ["b.txt", "sub/c.txt"]


def test_folder_of_data_files_beside_a_readme(tmp_path: Path):
    write_jsonl(tmp_path / "1.jsonl", [{"text": sentence(1)}] * 5)
    write_jsonl(tmp_path / "2.jsonl", [{"text": sentence(2)}] * 5)
    (tmp_path / "README.md").write_text("about")
    source = open_source(DataSettings(dataset=str(tmp_path)))
    assert len(rows(source.records())) == 10 and "left out: 1 text files" in " ".join(source.notes())


def test_identity_follows_content_not_place(tmp_path: Path):
    def identity(path: Path):
        return open_source(DataSettings(dataset=str(path))).identity()

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("same")
    assert identity(tmp_path / "a" / "x.txt") == identity(tmp_path / "b" / "x.txt")
    (tmp_path / "b" / "x.txt").write_text("other")
    assert identity(tmp_path / "a" / "x.txt") != identity(tmp_path / "b" / "x.txt")


def test_a_large_file_is_never_held_whole(tmp_path: Path):
    path = tmp_path / "big.txt"
    line = (sentence(3, 400) + "\n").encode()
    with open(path, "wb") as file:
        for _ in range(64 * (1 << 20) // len(line)):
            file.write(line)
    tracemalloc.start()
    total = sum(len(item.row["text"]) for item in read_text(path) if isinstance(item, Record))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == path.stat().st_size
    assert peak_bytes < path.stat().st_size / 2
