"""TensorStore: damaged stores and flipped bytes are found, and refused with the reason."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.storage import PosixEngine, StorageError, TensorStore
from outcore.storage.store.files import DATA_NAME
from outcore.storage.store.manifest import FILE_NAME as MANIFEST
from tests.refused import refused
from tests.storage.store_cases import SPECS, WAIT_S, assert_holds, read_back, values, write_all

# ---------------------------------------------------------------------- damaged stores


def _edit(path: Path, change: Callable[[dict], None], *, keep_checksum: bool = False) -> None:
    document = json.loads((path / MANIFEST).read_text())
    change(document["body"])
    if not keep_checksum:
        text = json.dumps(document["body"], sort_keys=True, separators=(",", ":"))
        document["crc32"] = f"{zlib.crc32(text.encode()):08x}"
    (path / MANIFEST).write_text(json.dumps(document))


def _tensor(body: dict, name: str) -> dict:
    return next(item for item in body["tensors"] if item["name"] == name)


def _change_body(**changes: Any) -> Callable[[Path], None]:
    return lambda path: _edit(path, lambda body: body.update(changes))


DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    ("no manifest.json here", lambda path: (path / MANIFEST).unlink()),
    ("not valid JSON", lambda path: (path / MANIFEST).write_text((path / MANIFEST).read_text()[:-40])),
    ("not valid JSON", lambda path: (path / MANIFEST).write_bytes(b"\xff\xfe\x00")),
    ("no body and checksum", lambda path: (path / MANIFEST).write_text("[]")),
    (
        "its checksum is",
        lambda path: _edit(path, lambda body: _tensor(body, "scale").update(start=8192), keep_checksum=True),
    ),
    ("not the manifest of a tensor store", _change_body(format="zip")),
    ("format version 99.*reads version 1", _change_body(version=99)),
    ("KeyError", lambda path: _edit(path, lambda body: body.pop("pattern"))),
    ("is not a size", _change_body(total_bytes="many")), ("do not follow from", _change_body(total_bytes=0)),
    ("unknown element type", lambda path: _edit(path, lambda body: _tensor(body, "scale").update(dtype="Tensor"))),
    ("do not fit shape", lambda path: _edit(path, lambda body: _tensor(body, "scale").update(shape=[7]))),
    ("overlap", lambda path: _edit(path, lambda body: _tensor(body, "moments").update(start=4096))),
    ("lies outside", lambda path: _edit(path, lambda body: _tensor(body, "mask").update(start=1 << 30))),
    ("not aligned", lambda path: _edit(path, lambda body: _tensor(body, "mask").update(start=5))),
    ("listed twice", lambda path: _edit(path, lambda body: _tensor(body, "mask").update(name="scale"))),
    ("has checksums where", lambda path: _edit(path, lambda body: _tensor(body, "mask").update(crc32=[1]))),
    ("must name each of", _change_body(pattern=[0, 5])), ("checksum_chunk_bytes", _change_body(checksum_chunk_bytes=0)),
    ("checksums where the store has none, or none", _change_body(checksum_chunk_bytes=MIB)),
    ("tensors.bin.*ENOENT", lambda path: (path / DATA_NAME).unlink()),
    ("bytes where .* were expected", lambda path: os.truncate(path / DATA_NAME, 70_000)),
    ("header of the data file is damaged", lambda path: _overwrite(path / DATA_NAME, 12, b"????")),
    ("belongs to store", _change_body(store_id="other")),
]  # fmt: skip


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(("words", "damage"), DAMAGES, ids=[words[:24] for words, _ in DAMAGES])
def test_a_damaged_store_is_refused_with_the_reason(tmp_path, engine, words, damage):
    TensorStore.create([tmp_path], SPECS, engine=engine).close()
    damage(tmp_path)
    refused(StorageError, words, lambda: TensorStore.open([tmp_path], engine=engine))
    with pytest.raises(StorageError, match=words):  # and the refusal released its locks
        TensorStore.open([tmp_path], engine=engine)


def test_wrong_number_order_or_mixture_of_drives(tmp_path: Path, engine: PosixEngine):
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    TensorStore.create([one, two], SPECS, engine=engine).close()
    TensorStore.create([three], SPECS, engine=engine).close()
    refused(StorageError, "lies in 2 directories, 1 were given", lambda: TensorStore.open([one]))
    refused(StorageError, r"no manifest.json here.*not the first", lambda: TensorStore.open([two, one]))
    (one / DATA_NAME).rename(tmp_path / "swap")
    (two / DATA_NAME).rename(one / DATA_NAME)
    (tmp_path / "swap").rename(two / DATA_NAME)
    refused(StorageError, r"file 2 of 2 and was given as file 1|bytes where", lambda: TensorStore.open([one, two]))
    refused(StorageError, "is the drive mounted", lambda: TensorStore.open([one, tmp_path / "missing"]))


def test_a_wrong_number_of_checksums_is_refused(tmp_path: Path, engine: PosixEngine):
    TensorStore.create([tmp_path], SPECS, True, engine).close()
    _edit(tmp_path, lambda body: _tensor(body, "moments").update(crc32=[1]))
    refused(StorageError, "1 checksums for 3 chunks", lambda: TensorStore.open([tmp_path]))


# ---------------------------------------------------------------------- checksums


def test_a_flipped_byte_is_found(paths: list[Path], engine: PosixEngine):
    tensors = values()
    with TensorStore.create(paths, SPECS, True, engine) as store:
        write_all(store, tensors)
        store.submit_write("moments", tensors["moments"][5:20], 20).wait(WAIT_S)  # partial: summed at commit
        store.commit()
        (extent, *_) = store.extent("moments")
    _overwrite(extent.path, extent.offset + 1234, b"\x55")
    with TensorStore.open(paths, "r", engine) as store:
        with pytest.raises(StorageError, match=r"verification of 'moments'.*bytes 0 to 1048576") as caught:
            store.submit_read("moments", torch.empty(600_001)).wait(WAIT_S)
        assert caught.value.path == extent.path
        assert caught.value.offset == extent.offset
        assert_holds(store, {name: tensor for name, tensor in tensors.items() if name != "moments"})
        # Chunks beyond the damaged one are good.
        rest = torch.empty(600_001 - MIB // 4)
        store.submit_read("moments", rest, MIB).wait(WAIT_S)
        assert torch.equal(rest, tensors["moments"][MIB // 4 :])


def test_data_overwritten_but_not_committed_is_refused(tmp_path: Path, engine: PosixEngine):
    with TensorStore.create([tmp_path], SPECS, True, engine) as store:
        write_all(store, values(1))
        store.commit()
        write_all(store, values(2))
        assert_holds(store, values(2))
    with TensorStore.open([tmp_path], engine=engine) as store:
        refused(StorageError, "killed after overwriting", lambda: read_back(store, "moments"))
        write_all(store, values(3))  # writing anew is the way out
        assert_holds(store, values(3))
        store.commit()
