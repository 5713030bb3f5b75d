"""Rows of Parquet, JSON and JSON Lines files, one at a time, whatever their size.

Place in the flow: `prompts` reads every corpus through `iter_rows`. JSON never passes through Arrow here:
its readers want one type per column, and real chat files mix strings, lists and nulls in `content`.

Errors are ValueErrors that name the file and the row or byte at fault; a cut file is an error, never a
silently shorter corpus. Invalid UTF-8 is passed on as lone surrogates for the normaliser to count.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

MESSAGE_COLUMNS = ("messages", "conversations")
OTHER_COLUMNS = ("uuid", "id", "category", "source")
SUFFIXES = (".parquet", ".jsonl", ".json")
WHITE_SPACE = re.compile(r"[ \t\r\n]*")
DECODER = json.JSONDecoder()
CHUNK_BYTES = 1 << 20
BATCH_ROWS = 256
INVALID_TEXT = "\udcff"  # stands for a Parquet row whose strings are not UTF-8


def corpus_files(path: Path) -> list[Path]:
    """`path` itself, or the data files below the folder `path`, links to folders included, sorted; hidden ones are not.

    Raises ValueError where there is no such file or nothing in it that could be read, and OSError for a folder that
    may not be looked into.
    """
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: expected a file ending in {', '.join(SUFFIXES)}")
        return [path]
    if not path.is_dir():
        raise ValueError(f"prompt file or folder {path} does not exist")
    files = [file for file in _files_below(path) if file.suffix in SUFFIXES]
    if not files:
        raise ValueError(f"folder {path} holds no file ending in {', '.join(SUFFIXES)}")
    return sorted(files)


def _files_below(path: Path) -> Iterator[Path]:
    """The files below a folder that are not hidden, each real folder once."""

    def fail(error: OSError) -> NoReturn:
        raise error

    seen = set()
    for folder, folders, names in os.walk(path, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link back to where we were
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in names if not name.startswith(".") and Path(folder, name).is_file())


def iter_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one file; memory holds a few hundred of them at most.

    Raises ValueError, naming the file and the byte or row, for a file that is empty, cut off, malformed or
    without a `messages` or `conversations` column.
    """
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes)")
    if path.suffix == ".parquet":
        rows = _parquet_rows(path)
    else:
        rows = _array_rows(path) if _first_byte(path) == b"[" else _line_rows(path)
    number = 0
    for number, row in enumerate(rows, start=1):
        if number == 1 and not any(column in row for column in MESSAGE_COLUMNS):
            raise ValueError(f"{path} row 1 has none of the columns {', '.join(MESSAGE_COLUMNS)}: {sorted(row)[:10]}")
        yield row
    if number == 0:
        raise ValueError(f"{path} holds no rows")


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} ({path.stat().st_size} bytes) is no complete Parquet file: {error}") from error
    names = file.schema_arrow.names
    if not any(column in names for column in MESSAGE_COLUMNS):
        raise ValueError(f"{path} has none of the columns {', '.join(MESSAGE_COLUMNS)}: {names}")
    columns = [name for name in names if name in MESSAGE_COLUMNS + OTHER_COLUMNS]
    done = 0
    batches = file.iter_batches(batch_size=BATCH_ROWS, columns=columns)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} cannot be read after row {done}: {error}") from error
        if batch is None:
            return
        yield from _batch_rows(batch)
        done += batch.num_rows


def _batch_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Rows of an Arrow batch; one with invalid UTF-8 becomes a row whose only message says so."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield {"messages": [{"role": "user", "content": INVALID_TEXT}]}


def _first_byte(path: Path) -> bytes:
    """The first byte that is neither white space nor part of a byte order mark."""
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            text = chunk.removeprefix(codecs.BOM_UTF8).lstrip()
            if text:
                return text[:1]
    raise ValueError(f"{path} holds nothing but white space")


def _line_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON Lines file; blank lines are allowed."""
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                try:
                    row = json.loads(text.decode("utf-8", "surrogateescape"))
                except (ValueError, RecursionError) as error:  # also a number, or a nesting, that Python refuses
                    raise ValueError(f"{path} line {number} (byte {offset}) is no JSON object: {error}") from error
                yield _require_object(row, f"{path} line {number}")
            offset += len(line)


def _array_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file that is one JSON array, decoded from a window that grows only to the longest row."""
    with open(path, "rb") as file:
        text = _Window(file)
        text.skip("[")
        number = 0
        while (separator := text.next_character()) != "]":
            if number:
                if separator != ",":
                    text.fail(f"expected ',' or ']' after row {number}")
                text.skip(",")
            number += 1
            yield _require_object(text.value(number), f"{path} row {number}")
        text.skip("]")
        if text.next_character(required=False):
            text.fail("data after the end of the array")


def _require_object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}, expected an object")
    return row


class _Window:
    """A sliding view of a JSON text: `start` is the next character of `text`, `offset` its byte in the file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self.text, self.start, self.ended = "", 0, False
        self.offset = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        file.seek(self.offset)

    def _read(self, size: int) -> bool:
        """Append up to `size` bytes; false at the end of the file."""
        chunk = self.file.read(size)
        self.text = self.text[self.start :] + self.decoder.decode(chunk, final=not chunk)
        self.start = 0
        return bool(chunk)

    def _advance(self, end: int) -> None:
        self.offset += len(self.text[self.start : end].encode("utf-8", "surrogateescape"))
        self.start = end

    def fail(self, message: str) -> NoReturn:
        """Raise ValueError with the file and the byte reached."""
        raise ValueError(f"{self.file.name} byte {self.offset}: {message}")

    def next_character(self, required: bool = True) -> str:
        """The next character that is no white space, not consumed; empty at the end if not `required`."""
        while True:
            self._advance(WHITE_SPACE.match(self.text, self.start).end())
            if self.start < len(self.text):
                return self.text[self.start]
            if not self._read(CHUNK_BYTES):
                if required:
                    self.fail("the JSON array is cut off")
                return ""

    def skip(self, character: str) -> None:
        """Consume `character`, which must come next."""
        if self.next_character() != character:
            self.fail(f"expected {character!r}")
        self._advance(self.start + 1)

    def value(self, number: int) -> Any:
        """Decode and consume the next JSON value, row `number` of the array."""
        self.next_character()
        size = CHUNK_BYTES
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.start)
            except json.JSONDecodeError as error:
                # An error near the end of the window, or an open string, may be a row still being read.
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - 16
                if cut and self._read(size):
                    size *= 2
                    continue
                state = "cut off" if cut else f"malformed ({error.msg})"
                self.fail(f"the JSON array is {state} in row {number}, which starts here")
            except (ValueError, RecursionError) as error:  # a number, or a nesting, that Python refuses
                self.fail(f"row {number}, which starts here, cannot be read: {error}")
            self._advance(end)
            return value
