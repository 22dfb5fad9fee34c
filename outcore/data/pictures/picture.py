"""One picture from a path, bytes, a parquet cell or a data: URL, as RGB pixels that stand upright.

Only common formats are decoded, and only after the header has shown that the pixels stay within the limits. Of an
animation the first frame is taken. Pillow decodes; what it finds damaged is an error that says so."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from outcore.common.quantities import MIB
from outcore.data.basis import shorten

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are decoded: those that people have. Each further decoder of Pillow is one more for strangers' bytes."""
MAX_SIDE_RATIO = 200
"""Longest side by the shortest: beyond it processors make thousands of tokens of a line, or fail."""


class PictureError(ValueError):
    """A picture that cannot be used, and why; without its row, which the caller knows."""


@dataclass(frozen=True)
class PictureLimits:
    """Limits of one picture (its encoded bytes, its pixels), and of one row or request (number of pictures)."""

    max_bytes: int = 50 * MIB
    max_pixels: int = 64_000_000
    max_pictures: int = 64


LIMITS = PictureLimits()


class Picture(NamedTuple):
    """Pixels, and what was done to get them that a person should know ('' when nothing)."""

    pixels: Image.Image
    said: str


def picture_of(value: Any, folder: Path | None = None, limits: PictureLimits = LIMITS) -> Picture:
    """The picture that a cell of a row, or a part of a message, holds. PictureError says why it is none.

    `folder`: where relative paths begin. None: no path is opened (a request's)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is the lower one
            return _upright(value if isinstance(value, Image.Image) else _opened(value, folder, limits), limits)
    except UnidentifiedImageError:
        raise PictureError(f"not a picture that can be read (known: {', '.join(FORMATS)})") from None
    except (PictureError, MemoryError):
        raise
    except Image.DecompressionBombError:  # Pillow's own limit, on opening
        raise PictureError(f"the picture has more than {limits.max_pixels / 1e6:.3g} million pixels") from None
    except Exception as error:  # of damaged tags Pillow's parsers raise whatever their code runs into
        raise PictureError(f"the picture is damaged or cut off ({shorten(str(error), 80)})") from error


def _opened(value: Any, folder: Path | None, limits: PictureLimits) -> Image.Image:
    data = _bytes_of(value, folder, limits)
    if len(data) > limits.max_bytes:
        raise PictureError(_too_large(len(data), limits))
    if not data:
        raise PictureError("the picture is empty (0 bytes)")
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _bytes_of(value: Any, folder: Path | None, limits: PictureLimits) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, Mapping):
        inner = next((value[key] for key in ("bytes", "path", "url", "image") if value.get(key) is not None), None)
        if inner is None or isinstance(inner, Mapping):
            raise PictureError(f"an object without 'bytes', 'path' or 'url': {shorten(repr(value), 60)}")
        return _bytes_of(inner, folder, limits)
    if not isinstance(value, (str, Path)):
        raise PictureError(f"a picture should be a path, bytes or a data: URL, found {type(value).__name__}")
    text = str(value)
    if text.startswith("data:"):
        return _of_data_url(text, limits)
    if text.startswith(("http:", "https:", "ftp:")):
        raise PictureError("pictures are not fetched from the network: save it and give its path, or send a data: URL")
    if folder is None:
        raise PictureError("a path is not opened here: send the picture itself, as a data: URL")
    try:
        path = folder / Path(text.removeprefix("file://")).expanduser()
        if not path.is_file():
            raise PictureError(f"there is no file {path}")
        if (size := path.stat().st_size) > limits.max_bytes:
            raise PictureError(f"{path}: {_too_large(size, limits)}")
        return path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~ of a user who has no home
        if isinstance(error, PictureError):
            raise
        raise PictureError(f"{shorten(text, 80)} cannot be read ({error})") from error


def _of_data_url(text: str, limits: PictureLimits) -> bytes:
    head, comma, body = text.partition(",")
    if not comma or not head.endswith(";base64"):
        raise PictureError("a data: URL should be data:image/png;base64,...")
    if len(body) > limits.max_bytes * 4 // 3 + 4:
        raise PictureError(_too_large(len(body) * 3 // 4, limits))
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"the data: URL is not base64 ({error})") from error


def _too_large(size: int, limits: PictureLimits) -> str:
    return f"the picture has {size / MIB:.1f} MiB, more than {limits.max_bytes / MIB:.0f} MiB"


def _upright(opened: Image.Image, limits: PictureLimits) -> Picture:
    """RGB pixels of the first frame, turned as EXIF says. The size is looked at before a pixel is decoded."""
    width, height = opened.size
    if width * height > limits.max_pixels:
        raise PictureError(
            f"the picture has {width:,} x {height:,} pixels, more than {limits.max_pixels / 1e6:.3g} million (a row's "
            "pictures count together): make it smaller"
        )
    if min(width, height) == 0 or max(width, height) > MAX_SIDE_RATIO * min(width, height):
        raise PictureError(f"the picture is {width:,} x {height:,}: no side may be {MAX_SIDE_RATIO} times the other")
    frames = getattr(opened, "n_frames", 1)
    said = f"the first of {frames} frames" if frames > 1 else ""
    if frames > 1:
        opened.seek(0)
    opened.load()
    turned = ImageOps.exif_transpose(opened)
    if turned.mode.startswith(("I", "F")):  # 16 bits and more: Pillow would cut off what is above 255
        values = turned.convert("F")
        low, high = values.getextrema()
        top = 65535.0 if turned.mode.startswith("I") else 1.0  # type: ignore[operator]
        if float(low) < 0 or float(high) > top:  # type: ignore[arg-type]
            raise PictureError(
                f"its values go from {low} to {high}, and 0 to {top:g} is expected of mode {turned.mode}"
            )
        turned = values.point(lambda value: value * (255.0 / top)).convert("L")
    if turned.has_transparency_data:  # white, as a page shows it, where transformers' processors would leave black
        whole = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole)
    return Picture(turned.convert("RGB"), said)
