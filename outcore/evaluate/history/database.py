"""The history: `evaluations.db` (SQLite, WAL) and, beside it, a folder for each evaluation with its whole result.

The database answers questions; the folders are what it can be made from again (`rebuild`), so a damaged one loses
nothing. Several processes may write: each waits for the other. A file that is no whole database is never written to."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

VERSION = 1
WAIT_S = 30.0
"""How long a writer waits for another one."""
LOOKS = 3
"""Looks at a file that seems cut off: another process may just have begun to write its log back."""
RESULT = "result.json"
HEADER = b"SQLite format 3\0"
SCHEMA = """
CREATE TABLE evaluations (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, status TEXT NOT NULL, created_at REAL NOT NULL, model TEXT NOT NULL,
    record TEXT NOT NULL
);
CREATE INDEX by_key ON evaluations (key);
CREATE TABLE scores (
    evaluation TEXT NOT NULL REFERENCES evaluations (id) ON DELETE CASCADE, task TEXT NOT NULL, version TEXT NOT NULL,
    metric TEXT NOT NULL, filter TEXT NOT NULL, value REAL, stderr REAL, documents INTEGER, higher_is_better INTEGER,
    PRIMARY KEY (evaluation, task, metric, filter)
);
CREATE TABLE samples (
    evaluation TEXT NOT NULL REFERENCES evaluations (id) ON DELETE CASCADE, task TEXT NOT NULL, filter TEXT NOT NULL,
    doc_id INTEGER NOT NULL, sample BLOB NOT NULL, PRIMARY KEY (evaluation, task, filter, doc_id)
);
"""
COLUMNS = ("task", "version", "metric", "filter", "value", "stderr", "documents", "higher_is_better")
Record = dict[str, Any]


class HistoryError(ValueError):
    """The history cannot be read or written; the message says why and what to do."""


class History:
    """Evaluations kept in SQLite. Each call opens the database anew, so threads and processes may share a value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.with_suffix("")
        """Folder of the evaluations' folders."""

    def folder_of(self, name: str) -> Path:
        """Folder in which an evaluation keeps its journal, its events and its result."""
        return self.folder / name

    def check_writable(self) -> None:
        """HistoryError when nothing could be kept; to be asked before the work, not after it."""
        with self._open(write=True) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")

    def save(self, record: Mapping[str, Any]) -> None:
        """Keep an evaluation's record as it is now. HistoryError."""
        with self._open(write=True) as database, _transaction(database):
            _put_record(database, record)

    def finish(self, record: Mapping[str, Any], scores: Sequence[Record], samples: Sequence[Record]) -> None:
        """Keep a whole result: first as a file, then in the database. HistoryError, with the file kept."""
        write_result(self.folder_of(record["id"]) / RESULT, record, scores, samples)
        try:
            with self._open(write=True) as database, _transaction(database):
                _put_result(database, record, scores, samples)
        except HistoryError as error:
            raise HistoryError(
                f"{error} The result is kept in {self.folder_of(record['id']) / RESULT}: once the database can be "
                "written, `outcore evaluations rebuild` takes it in."
            ) from error

    def get(self, name: str) -> Record:
        """A record with its scores; KeyError when there is none of that id (or beginning of one)."""
        with self._open() as database:
            rows = database.execute(
                "SELECT id, record FROM evaluations WHERE id = ? OR id LIKE ? ORDER BY created_at DESC",
                (name, f"{_plain(name)}%"),
            ).fetchall()
            exact = [row for row in rows if row[0] == name]
            if not rows or (len(rows) > 1 and not exact):
                raise KeyError(name)
            found = json.loads((exact or rows)[0][1])
            return found | {"scores": _scores(database, found["id"])}

    def all(self) -> list[Record]:
        """Records with their scores, newest first."""
        with self._open() as database:
            found = [
                json.loads(text)
                for (text,) in database.execute("SELECT record FROM evaluations ORDER BY created_at DESC, id")
            ]
            return [record | {"scores": _scores(database, record["id"])} for record in found]

    def unfinished(self, key: str) -> list[Record]:
        """Records of this key that have no result yet, newest first."""
        with self._open() as database:
            rows = database.execute(
                "SELECT record FROM evaluations WHERE key = ? AND status != 'completed' ORDER BY created_at DESC",
                (key,),
            )
            return [json.loads(text) for (text,) in rows]

    def samples(self, name: str, task: str | None = None, offset: int = 0, limit: int = -1) -> list[Record]:
        """Documents of an evaluation with their answers, in order."""
        with self._open() as database:
            rows = database.execute(
                "SELECT sample FROM samples WHERE evaluation = ? AND (? IS NULL OR task = ?) "
                "ORDER BY task, filter, doc_id LIMIT ? OFFSET ?",
                (name, task, task, limit, offset),
            )
            return [json.loads(zlib.decompress(data)) for (data,) in rows]

    def num_samples(self, name: str, task: str | None = None) -> int:
        """How many `samples` gives without a limit."""
        with self._open() as database:
            query = "SELECT count(*) FROM samples WHERE evaluation = ? AND (? IS NULL OR task = ?)"
            return int(database.execute(query, (name, task, task)).fetchone()[0])

    def remove(self, name: str) -> None:
        """Forget an evaluation: its rows and its folder."""
        with self._open(write=True) as database, _transaction(database):
            database.execute("DELETE FROM evaluations WHERE id = ?", (name,))
        folder = self.folder_of(name)
        for path in sorted(folder.glob("*")):
            path.unlink()
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()

    def rebuild(self) -> tuple[int, Path | None]:
        """Make the database from the results beside it; (how many, where the old file went). Records without a result
        are taken from an old database as far as it can be read. HistoryError for a file of another kind."""
        kept: list[Record] = []
        with contextlib.suppress(HistoryError):
            kept = self.all()
        results, aside = sorted(self.folder.glob(f"*/{RESULT}")), None
        if self.path.exists() and not results and not self._has_header():
            raise HistoryError(
                f"{self.path} is no database, and no results lie beside it that one could be made from. Give the "
                "database that `outcore evaluate` wrote."
            )
        if self.path.exists():
            aside = self.path.with_name(f"{self.path.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
            for suffix in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    self.path.with_name(self.path.name + suffix).rename(aside.with_name(aside.name + suffix))
            self.path.rename(aside)
        with self._open(write=True) as database, _transaction(database):
            for record in kept:
                _put_record(database, {k: v for k, v in record.items() if k != "scores"})
            for path in results:
                whole = read_result(path)
                _put_result(database, whole["record"], whole["scores"], whole["samples"])
        return len(results), aside

    # --- the file

    def _has_header(self) -> bool:
        with self.path.open("rb") as file:
            return file.read(len(HEADER)) == HEADER

    @contextlib.contextmanager
    def _open(self, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        try:
            database = self._connect(write=write)
        except (sqlite3.Error, OSError) as error:
            raise self._told(error) from error
        try:
            yield database
        except sqlite3.Error as error:
            raise self._told(error) from error
        finally:
            database.close()

    def _connect(self, *, write: bool) -> sqlite3.Connection:
        if not self.path.exists():
            if not write:
                return _with_schema(sqlite3.connect(":memory:"))
            self._create()
        self._check_size()
        if write and not os.access(self.path, os.W_OK):
            raise sqlite3.OperationalError("attempt to write a readonly database")
        mode = "rw" if os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK) else "ro"
        has_log = self.path.with_name(f"{self.path.name}-wal").exists()
        # A file that cannot be written has no place for the log's index either; without a log it needs none.
        options = f"mode={mode}" + ("&immutable=1" if mode == "ro" and not has_log else "")
        database = sqlite3.connect(f"file:{self.path.resolve()}?{options}", uri=True, timeout=WAIT_S)
        try:
            database.isolation_level = None
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version != VERSION:
                raise HistoryError(
                    f"{self.path} has the history's version {version}, this outcore knows {VERSION}. Update outcore, "
                    "or name another file with --database."
                )
            database.execute("PRAGMA foreign_keys = ON")
            database.execute("PRAGMA synchronous = FULL")
            return database
        except BaseException:
            database.close()
            raise

    def _create(self) -> None:
        """Make an empty history aside and give it its name whole: no process ever sees half of one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        aside.unlink(missing_ok=True)
        database = sqlite3.connect(aside)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            _with_schema(database)
        finally:
            database.close()
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(aside, self.path)
        aside.unlink()

    def _check_size(self) -> None:
        """Tell a file that was cut off: SQLite takes an empty one for a new database, and finds others late.

        A checkpoint of the log writes the header before the last pages: while there is a log, SQLite itself knows."""
        log, size = self.path.with_name(f"{self.path.name}-wal"), 0
        for _ in range(LOOKS):
            has_log = False
            with contextlib.suppress(FileNotFoundError):  # its last user has just closed it
                has_log = log.stat().st_size > 0
            with open(self.path, "rb") as file:
                head = file.read(100)
                size = os.fstat(file.fileno()).st_size
            page = int.from_bytes(head[16:18], "big")
            whole = (page if page > 1 else 65536) * int.from_bytes(head[28:32], "big")
            if len(head) == 100 and head.startswith(b"SQLite format 3\0") and (size >= whole or has_log):
                return
        raise sqlite3.DatabaseError(f"it has {size} bytes, which is no whole database")

    def _told(self, error: sqlite3.Error | OSError) -> HistoryError:
        words = str(error)
        if "readonly" in words or "unable to open" in words or isinstance(error, OSError):
            return HistoryError(
                f"{self.path} cannot be written ({words}). Give yourself the right to write the file and its folder, "
                "or name another file with --database."
            )
        if "locked" in words or "busy" in words:
            return HistoryError(f"{self.path} was in use by another process for {WAIT_S:.0f} s. Try again.")
        if "full" in words:
            return HistoryError(f"{self.path}: the drive is full. Free some space, then give the same command again.")
        return HistoryError(
            f"{self.path} is damaged ({words}). `outcore evaluations rebuild` puts it aside and makes it again from "
            f"the results in {self.folder}/."
        )


def write_result(path: Path, record: Mapping[str, Any], scores: Sequence[Record], samples: Sequence[Record]) -> None:
    """Keep a whole result as JSON. HistoryError."""
    from outcore.common.files import write_atomic

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"record": record, "scores": scores, "samples": samples}))
    except OSError as error:
        raise HistoryError(f"{path} cannot be written ({error.strerror}). Free space or choose --database.") from error


def read_result(path: Path) -> dict[str, Any]:
    """What `write_result` wrote. HistoryError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HistoryError(f"{path} cannot be read ({error}). Move its folder away.") from error


def _with_schema(database: sqlite3.Connection) -> sqlite3.Connection:
    database.executescript(SCHEMA)
    database.execute(f"PRAGMA user_version = {VERSION}")
    return database


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _put_record(database: sqlite3.Connection, record: Mapping[str, Any]) -> None:
    database.execute(
        "INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET status = excluded.status, "
        "record = excluded.record",
        (record["id"], record["key"], record["status"], record["created_at"], record["model"], json.dumps(record)),
    )


def _put_result(
    database: sqlite3.Connection, record: Mapping[str, Any], scores: Sequence[Record], samples: Sequence[Record]
) -> None:
    _put_record(database, record)
    name = record["id"]
    database.execute("DELETE FROM scores WHERE evaluation = ?", (name,))
    database.execute("DELETE FROM samples WHERE evaluation = ?", (name,))
    database.executemany(
        "INSERT INTO scores VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(name, *(score[column] for column in COLUMNS)) for score in scores],
    )
    database.executemany(
        "INSERT INTO samples VALUES (?, ?, ?, ?, ?)",
        [(name, one["task"], one["filter"], one["doc_id"], zlib.compress(json.dumps(one).encode())) for one in samples],
    )


def _scores(database: sqlite3.Connection, name: str) -> list[Record]:
    rows = database.execute(f"SELECT {', '.join(COLUMNS)} FROM scores WHERE evaluation = ? ORDER BY rowid", (name,))
    found: list[Record] = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    for score in found:
        if score["higher_is_better"] is not None:
            score["higher_is_better"] = bool(score["higher_is_better"])
    return found


def _plain(name: str) -> str:
    """A beginning of an id without wildcards."""
    return "".join(letter for letter in name if letter.isalnum() or letter == "-") or "-"
