"""Messages with their pictures where they belong, in the form that chat templates of processors take.

Three spellings say where a picture stands: a content part (`{"type": "image"}`, `image_url`), `<image>` in a text, or
neither, and then all pictures come before the first user's words. Parts that hold no picture of their own take those of
the row's column in order. A row in which pictures and their places differ in number is refused, so that nothing is
trained on a place without its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from outcore.common.quantities import counted
from outcore.data.pictures.picture import LIMITS, PictureError, PictureLimits, picture_of

MARK = "<image>"
IMAGE_TYPES = ("image", "image_url", "input_image")
VALUE_KEYS = ("image", "image_url", "url", "path", "bytes")


class PictureTalk(NamedTuple):
    """Messages whose content is a list of parts, and the pictures of their image parts, in order."""

    messages: list[dict[str, Any]]
    pictures: list[Image.Image]
    said: list[str]
    """Changes to single pictures that a person should know of."""

    def shown_before(self, stop: int) -> list[Image.Image]:
        """Pictures of the messages before this one."""
        parts = [part for message in self.messages[:stop] for part in message["content"]]
        return self.pictures[: sum(part["type"] == "image" for part in parts)]


def marked(messages: Any, own: list[Any], mark: str = MARK) -> Any:
    """Messages with `mark` in the place of each content part that is a picture; `own` gets the part's picture, or None
    where it stands elsewhere. What is no list of messages is returned as it is."""
    if not isinstance(messages, list):
        return messages
    return [_marked(message, own, mark) if isinstance(message, Mapping) else message for message in messages]


def _marked(message: Mapping[str, Any], own: list[Any], mark: str) -> dict[str, Any]:
    key = "content" if "content" in message else "value"
    parts, found = message.get(key), list[Any]()
    if isinstance(parts, str):
        own += [None] * parts.count(mark)
    if not isinstance(parts, list):
        return dict(message)
    for part in parts:
        if isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES:
            value = next((part[name] for name in VALUE_KEYS if part.get(name)), None)
            own.append(value["url"] if isinstance(value, Mapping) and "url" in value else value)
            part = {"type": "text", "text": mark}
        found.append(part)
    return {**message, key: found}


def in_order(own: Sequence[Any], column: Any) -> list[Any]:
    """All pictures of a row, of its messages and of its column (one, or a list), as their places come."""
    is_one = not isinstance(column, (list, tuple))
    rest = iter([] if column in (None, "", b"") else [column] if is_one else column)
    found = [next(rest, None) if value is None else value for value in own]
    return [value for value in found if value is not None] + list(rest)


def conversation_of(
    messages: Sequence[Mapping[str, Any]],
    values: Sequence[Any] | None,
    folder: Path | None = None,
    limits: PictureLimits = LIMITS,
    mark: str = MARK,
) -> PictureTalk:
    """Messages of text, in which `mark` is a place, and pictures brought together. PictureError says what does not fit.
    `values` None: nobody speaks of pictures, and the mark is text like any other."""
    if values is None:
        values, found = (), [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    else:
        found = [{**message, "content": _parts(message["content"] or "", mark)} for message in messages]
    places = sum(part["type"] == "image" for message in found for part in message["content"])
    if values and not places:
        first = next((message for message in found if message["role"] == "user"), None)
        if first is None:
            raise PictureError(f"there is no user's message for its {counted(len(values), 'picture')}")
        first["content"][:0] = [{"type": "image"} for _ in values]
    elif places != len(values):
        raise PictureError(
            f"the text has {counted(places, 'place')} for pictures, and there {'is' if len(values) == 1 else 'are'} "
            f"{counted(len(values), 'picture')}: each place needs its own"
        )
    if len(values) > limits.max_pictures:
        raise PictureError(f"{len(values)} pictures, more than {limits.max_pictures}")
    pictures, said, left = list[Image.Image](), list[str](), limits.max_pixels
    for number, value in enumerate(values, 1):
        try:
            picture = picture_of(value, folder, replace(limits, max_pixels=left))
        except PictureError as error:
            raise PictureError(f"picture {number}: {error}") from error
        left -= picture.pixels.width * picture.pixels.height
        pictures.append(picture.pixels)
        said += [f"picture {number}: {picture.said}"] if picture.said else []
    return PictureTalk(found, pictures, said)


def _parts(text: str, mark: str) -> list[dict[str, Any]]:
    found = list[dict[str, Any]]()
    for number, piece in enumerate(text.split(mark)):
        found += [{"type": "image"}] if number else []
        found += [{"type": "text", "text": piece}] if piece else []
    return found
