"""Parquet tables of any size: row groups bounded in bytes, and rows ordered by a key without holding them all.

Place in the flow: `prompts` orders a corpus by content id with `BucketSort` and writes it with `new_table`;
`pipelines/shards.py` writes its turns in `row_groups`. Readers decode one row group at a time, so its size is
what a reader holds, however long single rows are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lilicorr.folder import ASIDE, flush

GROUP_ROWS = 2048
GROUP_BYTES = 16 << 20  # of the table in memory
NUM_BUCKETS = 64
BUFFER_ROWS = 16_384  # rows that are sorted into buckets before they go to disk
BUFFER_CHARS = 32 << 20


def row_groups(table: pa.Table) -> Iterator[pa.Table]:
    """Cut a table into pieces of at most `GROUP_ROWS` rows and `GROUP_BYTES` bytes; a longer row is its own piece."""
    for start in range(0, table.num_rows, GROUP_ROWS):
        yield from _halves(table.slice(start, GROUP_ROWS))


def _halves(table: pa.Table) -> Iterator[pa.Table]:
    if table.num_rows <= 1 or table.nbytes <= GROUP_BYTES:
        yield table
        return
    middle = table.num_rows // 2
    yield from _halves(table.slice(0, middle))
    yield from _halves(table.slice(middle))


@contextmanager
def new_table(path: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], None]]:
    """Yield a function that appends tables to a file; it is at `path` if the block ends without an error.

    Row groups are filled to `GROUP_ROWS` rows across the appended tables, unless `GROUP_BYTES` cut them earlier.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{ASIDE}{path.name}")
    waiting = schema.empty_table()
    try:
        with pq.ParquetWriter(aside, schema, compression="zstd") as writer:

            def append(table: pa.Table) -> None:
                nonlocal waiting
                waiting = pa.concat_tables([waiting, table])
                whole = waiting.num_rows - waiting.num_rows % GROUP_ROWS
                for group in row_groups(waiting.slice(0, whole)):
                    writer.write_table(group)
                waiting = waiting.slice(whole)

            yield append
            for group in row_groups(waiting):
                writer.write_table(group)
        flush(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


class BucketSort:
    """Orders rows by a text key in hexadecimal digits, evenly spread, through files in a folder.

    Rows go to one of `NUM_BUCKETS` files by the beginning of their key; a bucket is sorted when it is read, so
    memory holds one bucket, or `BUFFER_CHARS` characters of rows on their way to the disk.
    """

    def __init__(self, folder: Path, schema: pa.Schema, key: str) -> None:
        self.schema, self.key = schema, key
        self._rows: list[list[dict[str, Any]]] = [[] for _ in range(NUM_BUCKETS)]
        self._num_rows = self._num_chars = 0
        self._paths = [folder / f"bucket-{number}.arrow" for number in range(NUM_BUCKETS)]
        self._writers = [pa.ipc.new_stream(path, schema) for path in self._paths]

    def add(self, row: dict[str, Any], num_chars: int) -> None:
        """Add a row of about `num_chars` characters."""
        self._rows[int(row[self.key][:4], 16) * NUM_BUCKETS >> 16].append(row)
        self._num_rows += 1
        self._num_chars += num_chars
        if self._num_rows >= BUFFER_ROWS or self._num_chars >= BUFFER_CHARS:
            self._write()

    def _write(self) -> None:
        for number, rows in enumerate(self._rows):
            if rows:
                self._writers[number].write_table(pa.Table.from_pylist(rows, schema=self.schema))
                self._rows[number] = []
        self._num_rows = self._num_chars = 0

    def close(self) -> None:
        """Write what is buffered; no row can be added after it."""
        self._write()
        for writer in self._writers:
            writer.close()

    def tables(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """The rows in the order of their keys, bucket by bucket; of equal keys only the row added first."""
        for path in self._paths:
            with pa.memory_map(str(path)) as source:
                table = pa.ipc.open_stream(source).read_all()
                order = pc.sort_indices(table[self.key])  # stable
                keys = table[self.key].take(order).combine_chunks()
                if len(keys) > 1:
                    first = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
                    order = order.filter(pa.concat_arrays([pa.array([True]), first]))
                # a take from one chunk; from many small ones it would copy the whole column for each of them
                yield table.select(columns or self.schema.names).combine_chunks().take(order)


@contextmanager
def bucket_sort(parent: Path, schema: pa.Schema, key: str) -> Iterator[BucketSort]:
    """A `BucketSort` whose files lie in a folder beside others in `parent` and are gone afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=ASIDE, dir=parent) as folder:
        sort = BucketSort(Path(folder), schema, key)
        yield sort
