"""Row groups stay small whatever the rows, a file is there whole or not at all, and rows are ordered through files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lilicorr import parquet
from lilicorr.parquet import bucket_sort, new_table, row_groups

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("texts", pa.list_(pa.struct([("text", pa.string())]))),
        ("name", pa.dictionary(pa.int32(), pa.string())),
        ("number", pa.int64()),
    ]
)


def row(number: int, size: int = 1) -> dict:
    return {"key": f"{number:032x}", "texts": [{"text": "x" * size}], "name": "ab"[number % 2], "number": number}


def table(rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def test_row_groups_are_bounded_in_rows_and_bytes_and_a_longer_row_stands_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parquet, "GROUP_ROWS", 10)
    monkeypatch.setattr(parquet, "GROUP_BYTES", 4000)
    whole = table([row(i, 10_000 if i == 33 else 100 if i < 20 else 900) for i in range(45)])
    groups = list(row_groups(whole))
    assert pa.concat_tables(groups).to_pylist() == whole.to_pylist()
    assert all(group.num_rows <= 10 for group in groups)
    assert [group.num_rows for group in groups[:2]] == [10, 10]
    assert all(group.nbytes <= 4000 or group.num_rows == 1 for group in groups)
    assert [group["number"].to_pylist() for group in groups if group.nbytes > 4000] == [[33]]


def test_groups_are_filled_over_the_appended_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "GROUP_ROWS", 10)
    with new_table(tmp_path / "new" / "a.parquet", SCHEMA) as append:
        for start in range(0, 24, 4):
            append(table([row(i) for i in range(start, start + 4)]))
        append(table([]))
        append(table([row(24)]))
    file = pq.ParquetFile(tmp_path / "new" / "a.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [10, 10, 5]
    assert file.read()["number"].to_pylist() == list(range(25))


def test_an_error_leaves_the_former_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with new_table(path, SCHEMA) as append:
        append(table([row(1)]))
    with pytest.raises(KeyError), new_table(path, SCHEMA) as append:
        append(table([row(2)]))
        raise KeyError
    assert pq.read_table(path)["number"].to_pylist() == [1] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("buffer", [{"BUFFER_ROWS": 5}, {"BUFFER_CHARS": 300}, {}])
def test_rows_come_ordered_and_of_equal_keys_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: dict[str, int]
) -> None:
    for name, value in buffer.items():
        monkeypatch.setattr(parquet, name, value)
    keys = [f"{(i * 7919) % 65536:04x}{'0' * 28}" for i in range(300)]
    with bucket_sort(tmp_path, SCHEMA, "key") as ordered:
        for number, key in enumerate([*keys, *keys[::3]]):
            ordered.add({**row(number), "key": key}, 32)
        ordered.close()
        rows = pa.concat_tables(ordered.tables()).to_pylist()
        assert rows == sorted(({**row(i), "key": key} for i, key in enumerate(keys)), key=lambda r: r["key"])
        numbers = pa.concat_tables(ordered.tables(["number"]))
        assert numbers.column_names == ["number"] and numbers["number"].to_pylist() == [r["number"] for r in rows]
        assert sum(part.num_rows > 0 for part in ordered.tables()) > 20
    assert list(tmp_path.iterdir()) == []
