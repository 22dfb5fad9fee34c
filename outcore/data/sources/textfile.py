"""Text out of files: UTF-8 with or without BOM, CRLF, gzip and zstd, read in blocks so that no file is held whole.

A byte that is not UTF-8 is an error with the file and the byte's offset, never a replacement character: silently
damaged text would be trained on. Offsets in compressed files count uncompressed bytes."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from outcore.common.quantities import MIB
from outcore.data.basis import DataError

BLOCK_BYTES = 4 * MIB
HEAD_BYTES = 4096
"""Enough to tell another encoding or a binary file."""
_BOMS_OF_OTHERS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


class BadText(DataError):
    """Bytes that are not UTF-8 text, with file and offset."""


def plain_suffix(path: Path) -> str:
    """The extension that tells the format, lower case: data.jsonl.gz -> .jsonl."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".zst"):
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed if its name ends in .gz or .zst; read errors become DataError with the path."""
    suffix = path.suffix.lower()
    try:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(open(path, "rb"))
            if suffix == ".gz":
                yield cast("IO[bytes]", stack.enter_context(gzip.open(raw, "rb")))
            elif suffix == ".zst":
                import pyarrow

                unpacked = stack.enter_context(pyarrow.CompressedInputStream(raw, "zstd"))
                yield cast(
                    "IO[bytes]", stack.enter_context(io.BufferedReader(cast("io.RawIOBase", unpacked), BLOCK_BYTES))
                )
            else:
                yield raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: the compressed file is damaged or cut short ({error}). Copy it again") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder where a file was expected") from error
    except PermissionError as error:
        raise DataError(f"{path} cannot be read: permission denied. Change its owner or mode (chmod +r)") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def decode(data: bytes, path: Path, offset: int) -> str:
    """UTF-8 to text; BadText with the offset of the first wrong byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad_text(path, offset + error.start, data[error.start : error.start + 1]) from error


def _bad_text(path: Path, offset: int, byte: bytes) -> BadText:
    shown = f" (0x{byte.hex()})" if byte else ""
    return BadText(
        f"{path}: byte offset {offset}{shown} is not UTF-8. Convert the file, e.g. "
        f"iconv -f WINDOWS-1252 -t UTF-8 IN > OUT"
    )


def check_head(head: bytes, path: Path) -> None:
    """Refuses other encodings and binary files by their first bytes, with the command that converts."""
    for bom, name in _BOMS_OF_OTHERS:
        if head.startswith(bom):
            raise BadText(f"{path} is {name}, not UTF-8 (byte offset 0). Convert it: iconv -f {name} -t UTF-8 IN > OUT")
    if b"\0" in head[:1024]:
        raise BadText(f"{path} is a binary file, not text (a zero byte at byte offset {head.index(0)})")


def iterate_lines(path: Path, *, keep_ends: bool = False) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, byte offset, bytes of the line), BOM removed; one line in RAM at a time. Line ends are
    removed unless they are to be kept."""
    with open_bytes(path) as file:
        offset = 0
        for number, line in enumerate(file, start=1):
            start = offset
            offset += len(line)
            if number == 1:
                check_head(line[:HEAD_BYTES], path)
                if line.startswith(codecs.BOM_UTF8):
                    start += len(codecs.BOM_UTF8)
                    line = line[len(codecs.BOM_UTF8) :]
            yield number, start, line if keep_ends else line.rstrip(b"\r\n")


def iterate_text(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[str]:
    """The file's text in blocks, BOM removed, CRLF and CR made LF; a character is never split over two blocks."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    with open_bytes(path) as file:
        consumed = 0
        block = file.read(HEAD_BYTES)
        check_head(block, path)
        if block.startswith(codecs.BOM_UTF8):
            consumed = len(codecs.BOM_UTF8)
            block = block[consumed:]
        while True:
            following = file.read(block_bytes)
            pending = decoder.getstate()[0]
            try:
                text = decoder.decode(block, final=not following)
            except UnicodeDecodeError as error:
                where = consumed - len(pending) + error.start
                raise _bad_text(path, where, error.object[error.start : error.start + 1]) from error
            consumed += len(block)
            text = newlines.decode(text, final=not following)
            if text:
                yield text
            if not following:
                return
            block = following
