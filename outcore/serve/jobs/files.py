"""Files that clients send for jobs and fetch with results: in a folder, each with its description beside it."""

from __future__ import annotations

import re
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path

from python_multipart import parse_form
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File

from outcore.common import write_atomic, write_json
from outcore.common.files import read_object
from outcore.serve.errors import ApiError, bad

_ID = re.compile(r"^file-[0-9a-f]{32}$")


@dataclass(frozen=True)
class StoredFile:
    """Description of a file, in OpenAI's shape."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"


class Files:
    """Files that clients sent, or batches wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # what clients sent is theirs and ours

    def add(self, data: bytes, filename: str, purpose: str, key: uuid.UUID | None = None) -> StoredFile:
        """Keep these bytes, in place of what was kept by the same key."""
        name = f"file-{(key or uuid.uuid4()).hex}"
        write_atomic(self.folder / name, data)
        return self.describe(name, filename, purpose)

    def describe(self, name: str, filename: str, purpose: str) -> StoredFile:
        """Note what the file `name`, which lies in the folder, is."""
        found = StoredFile(name, (self.folder / name).stat().st_size, int(time.time()), filename, purpose)
        write_json(self.folder / f"{name}.json", asdict(found))
        return found

    def get(self, name: str) -> StoredFile:
        """A file's description; 404 when there is none."""
        found = read_object(self.folder / f"{name}.json") if _ID.match(name) else {}
        with suppress(TypeError):  # of other fields
            file = StoredFile(**found)
            if file.id == name and type(file.bytes) is type(file.created_at) is int:
                return file
        raise ApiError(404, f"There is no file {name!r}.", param="file_id")

    def path(self, name: str) -> Path:
        """Path where its bytes are."""
        return self.folder / self.get(name).id

    def all(self) -> list[StoredFile]:
        """Newest first; what cannot be read is left out, and alone."""
        found = []
        for path in self.folder.glob("file-*.json"):
            with suppress(ApiError):
                found.append(self.get(path.stem))
        return sorted(found, key=lambda file: (-file.created_at, file.id))

    def remove(self, name: str) -> None:
        """Forget a file."""
        path = self.path(name)
        path.with_name(f"{name}.json").unlink()
        path.unlink(missing_ok=True)


def parts_of(content_type: str, body: bytes) -> dict[str, tuple[str, bytes]]:
    """Fields of a multipart form that are whole: name -> (file name, bytes). ApiError for what is none."""
    if not content_type.lower().startswith("multipart/form-data"):
        raise bad("A file is sent as multipart/form-data with the fields file and purpose.")
    found: dict[str, tuple[str, bytes]] = {}

    def keep(part: Field) -> None:
        found[_text(part.field_name)] = ("", part.value or b"")

    def keep_file(part: File) -> None:
        part.file_object.seek(0)
        found[_text(part.field_name)] = (_text(part.file_name), part.file_object.read())
        part.close()

    try:
        parse_form({"Content-Type": content_type.encode("latin-1")}, BytesIO(body), keep, keep_file)
    except FormParserError as error:
        raise bad(f"The form cannot be read: {error}.") from None
    return found


def _text(name: bytes | None) -> str:
    return (name or b"").decode(errors="replace")
