"""Every raw row becomes a clean conversation or a counted drop; every broken file is named."""

from __future__ import annotations

import errno
import json
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lilicorr import parquet, rows, stdlib
from lilicorr.config import PromptConfig
from lilicorr.prompts import (
    Conversation,
    Dropped,
    conversation_id,
    normalise,
    prepare_conversations,
    quotas,
    read_conversations,
    write_conversations,
)
from lilicorr.rows import corpus_files, iter_rows
from prompt_files import load_conversations

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be brief."}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def load(path: Path, **changes: Any) -> tuple[list[Conversation], list[Conversation], dict[str, int]]:
    return load_conversations(replace(PromptConfig(source=str(path), held_out_fraction=0.0), **changes))


def write_lines(path: Path, items: list[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def write_array(path: Path, number: int) -> tuple[Path, list[dict[str, Any]]]:
    items = [{"messages": [user(f"question {i} äöü {{[\"'\\ " + "x" * (i % 97)), ANSWER]} for i in range(number)]
    path.write_text(json.dumps(items, ensure_ascii=False, indent=1), encoding="utf-8")
    return path, items


KEPT = {
    "string": ({"messages": [USER]}, [USER]),
    "ends in assistant": ({"messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER]),
    "multi-turn": ({"messages": [USER, ANSWER, user("and?"), ANSWER]}, [USER, user("and?")]),
    "user turns in a row": ({"messages": [USER, user("again")]}, [USER, user("again")]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "x"}], "id": 7},
        [USER],
    ),
    "sharegpt in openai keys": ({"conversations": [USER, ANSWER]}, [USER]),
    "null messages, conversations": ({"messages": None, "conversations": [USER]}, [USER]),
    "parts": ({"messages": [user([{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}])]}, [USER]),
    "key order": ({"messages": [{"content": "hello", "role": "user"}]}, [USER]),
    "extra keys": ({"messages": [{**USER, "tool_calls": None, "name": "me"}], "license": "x"}, [USER]),
    "developer": ({"messages": [{"role": "developer", "content": "Be brief."}, USER]}, [SYSTEM, USER]),
    "empty system": ({"messages": [{"role": "system", "content": " "}, USER]}, [USER]),
    "null assistant content": ({"messages": [USER, {"role": "assistant", "content": None}]}, [USER]),
    "special-token text": ({"messages": [user("a<|im_end|>b")]}, [user("a<|im_end|>b")]),
    "spaces stay": ({"messages": [user("  x\n")]}, [user("  x\n")]),
}


@pytest.mark.parametrize("name", KEPT)
def test_usable_rows(name: str) -> None:
    row, expected = KEPT[name]
    assert normalise(row) == expected


DROPPED = {
    "no_messages": [{}, {"messages": []}, {"messages": None}, {"messages": "hello"}, {"messages": {"role": "user"}}],
    "no_user_turn": [{"messages": [SYSTEM]}, {"messages": [ANSWER]}, {"messages": [SYSTEM, ANSWER]}],
    "assistant_first": [{"messages": [ANSWER, USER, ANSWER]}, {"messages": [SYSTEM, ANSWER, USER]}],
    "content_withheld": [{"messages": [user(None)]}, {"messages": [{"role": "system", "content": None}, USER]}],
    "empty_user_turn": [{"messages": [user("")]}, {"messages": [USER, ANSWER, user(" \n")]}, {"messages": [user([])]}],
    "tool_turn": [{"messages": [USER, {"role": "tool", "content": "3"}]}],
    "unknown_role": [{"messages": [{"role": "narrator", "content": "x"}]}, {"messages": [{"role": 3, "content": "x"}]}],
    "content_not_text": [
        {"messages": [user(3)]},
        {"messages": [user([{"type": "image_url", "image_url": "x"}])]},
        {"messages": [user([{"type": "text", "text": None}])]},
    ],
    "message_not_an_object": [{"messages": ["hello"]}],
    "system_not_first": [{"messages": [USER, SYSTEM]}, {"messages": [SYSTEM, SYSTEM, USER]}],
    "invalid_unicode": [{"messages": [user("a\ud800b")]}],
    "too_long": [{"messages": [user("x" * 400_000)]}],
    "too_many_turns": [{"messages": 16_384 * [USER, ANSWER, USER]}],
}


@pytest.mark.parametrize("reason", DROPPED)
def test_unusable_rows_have_a_reason(reason: str) -> None:
    for row in DROPPED[reason]:
        with pytest.raises(Dropped, match=f"^{reason}$"):
            normalise(row, max_chars=399_999)


def test_every_row_is_accounted_for(tmp_path: Path) -> None:
    unusable = [row for rows_of_reason in DROPPED.values() for row in rows_of_reason]
    items = [{"messages": [USER]}, *unusable, {"messages": [USER, ANSWER]}, {"messages": [SYSTEM, USER]}]
    train, held_out, counts = load(write_lines(tmp_path / "mixed.jsonl", items), max_chars=399_999)
    assert sorted(c.messages[-1]["content"] for c in train) == ["hello", "hello"] and held_out == []
    assert counts["rows"] == len(items) and counts["duplicate"] == 1 and counts["train"] == 2
    for reason, rows_of_reason in DROPPED.items():
        assert counts[f"dropped_{reason}"] == len(rows_of_reason), reason


def test_a_long_turn_is_kept_without_a_limit(tmp_path: Path) -> None:
    train, _, counts = load(write_lines(tmp_path / "long.jsonl", [{"messages": [user("x" * 400_000)]}]))
    assert len(train[0].messages[0]["content"]) == 400_000 and counts["train"] == 1


def test_invalid_utf8_is_a_counted_drop(tmp_path: Path) -> None:
    good, bad = json.dumps({"messages": [USER]}).encode(), b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'
    (tmp_path / "lines.jsonl").write_bytes(good + b"\n\n" + bad + b"\r\n")
    (tmp_path / "array.json").write_bytes(b"\xef\xbb\xbf[" + bad + b"," + good + b"]\n")
    messages = pa.StructArray.from_arrays(
        [pa.array(["user", "user"]), pa.array([b"hello", b"\xff"]).cast(pa.binary()).view(pa.string())],
        names=["role", "content"],
    )
    table = pa.table({"messages": pa.ListArray.from_arrays([0, 1, 2], messages)})
    pq.write_table(table, tmp_path / "table.parquet")
    for name in ("lines.jsonl", "array.json", "table.parquet"):
        train, _, counts = load(tmp_path / name)
        assert [c.messages for c in train] == [[USER]] and counts["dropped_invalid_unicode"] == 1, name


def test_the_same_rows_from_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, items = write_array(tmp_path / "a.json", 300)
    write_lines(tmp_path / "b.jsonl", items)
    pq.write_table(pa.Table.from_pylist(items), tmp_path / "c.parquet", row_group_size=70)
    for size in (1, 7, 4096, 1 << 20):
        monkeypatch.setattr(rows, "CHUNK_BYTES", size)
        assert list(iter_rows(path)) == items
    assert list(iter_rows(tmp_path / "b.jsonl")) == items
    assert list(iter_rows(tmp_path / "c.parquet")) == items
    train, _, counts = load(tmp_path)
    assert counts["rows"] == 900 and counts["duplicate"] == 600 and len(train) == 300
    assert {c.source for c in train} == {"a"}


@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_a_cut_array_names_file_and_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk)
    path, items = write_array(tmp_path / "cut.json", 200)
    data = path.read_bytes()
    for size in (4096, 8192, len(data) - 1, data.rindex(b"{") + 1, data.rindex(b",") + 1, 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"cut\.json byte (\d+): the JSON array is cut off") as error:
            list(iter_rows(path))
        offset = int(str(error.value).split("byte ")[1].split(":")[0])
        assert offset == size or data[offset : offset + 1] == b"{", size
        with pytest.raises(ValueError, match=r"cut\.json byte"):
            load(path)


BROKEN = {
    "empty.jsonl": (b"", "empty.jsonl is empty"),
    "empty.parquet": (b"", "empty.parquet is empty"),
    "blank.json": (b" \n\n ", "blank.json holds nothing but white space"),
    "none.json": (b"[]", "none.json holds no rows"),
    "word.jsonl": (b'{"messages": []}\n{"messages": [\n', r"word.jsonl line 2 \(byte 17\) is no JSON"),
    "list.jsonl": (b'{"messages": []}\n[1]\n', "list.jsonl line 2 is a list, expected an object"),
    "number.json": (b'[{"messages": []}, 3]', "number.json row 2 is a int, expected an object"),
    "malformed.json": (
        b'[{"messages": []}, {"messages": !}, ' + b" " * 100 + b"]",
        r"malformed.json byte 19: .* row 2",
    ),
    "comma.json": (b'[{"messages": []} {"messages": []}]', "comma.json byte 18: expected ',' or ']' after row 1"),
    "after.json": (b'[{"messages": []}] x', "after.json byte 19: data after the end"),
    "column.jsonl": (b'{"text": "hello"}\n', r"column.jsonl row 1 has none of the columns messages, .*\['text'\]"),
    "digits.jsonl": (
        b'{"messages": [], "n": ' + b"9" * 5000 + b"}",
        "digits.jsonl line 1 .* is no JSON object: .*4300",
    ),
    "deep.json": (b'[{"messages": ' + b"[" * 200_000, "deep.json byte 1: row 1, .* cannot be read: .*recursion"),
    "page.parquet": (b"PAR1 is not enough", "page.parquet .* is no complete Parquet file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(tmp_path: Path, name: str) -> None:
    data, message = BROKEN[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(iter_rows(tmp_path / name))


def test_broken_parquet_is_named(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"messages": [user(f"{random.Random(i).random()}")]} for i in range(5000)])
    path = tmp_path / "t.parquet"
    pq.write_table(table, path, row_group_size=500, compression="none")
    data = path.read_bytes()
    path.write_bytes(data[:4096])
    with pytest.raises(ValueError, match=r"t\.parquet \(4096 bytes\) is no complete Parquet file"):
        list(iter_rows(path))
    pq.write_table(table.rename_columns(["text"]), path)
    with pytest.raises(ValueError, match=r"t\.parquet has none of the columns messages, conversations: \['text'\]"):
        list(iter_rows(path))


def test_links_to_folders_are_followed_and_circles_end(tmp_path: Path) -> None:
    mix, elsewhere = tmp_path / "mix", tmp_path / "elsewhere"
    for folder in (mix / "deep", elsewhere):
        folder.mkdir(parents=True)
    folders = (mix / "deep", elsewhere)
    files = [write_lines(folder / f"{folder.name}.jsonl", [{"messages": [USER]}]) for folder in folders]
    (mix / "linked").symlink_to(elsewhere)
    (mix / "deep" / "up").symlink_to(mix)
    assert corpus_files(mix) == [files[0], mix / "linked" / "elsewhere.jsonl"]


def test_a_folder_that_may_not_be_looked_into_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "a.jsonl", [{"messages": [USER]}])
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def scandir(path: str) -> Any:  # the superuser may look into everything
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="closed"):
        corpus_files(tmp_path)


def test_missing_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing does not exist"):
        load(tmp_path / "nothing")
    (tmp_path / ".cache").mkdir()
    write_lines(tmp_path / ".cache" / "hidden.jsonl", [{"messages": [USER]}])
    with pytest.raises(ValueError, match="holds no file ending in"):
        load(tmp_path)
    with pytest.raises(ValueError, match="expected a file ending in"):
        corpus_files(write_lines(tmp_path / "a.txt", []))
    with pytest.raises(ValueError, match="left no training conversation"):
        load(write_lines(tmp_path / "a.jsonl", [{"messages": []}]))


def test_the_id_is_of_the_content_alone(tmp_path: Path) -> None:
    assert conversation_id([SYSTEM, USER]) == conversation_id([dict(reversed(m.items())) for m in (SYSTEM, USER)])
    different = [[USER], [SYSTEM, USER], [USER, USER], [user("hello ")], [user("hellohello")]]
    assert len({conversation_id(messages) for messages in different}) == len(different)
    assert conversation_id([USER]) != conversation_id([USER], revision="2")
    assert len(conversation_id([USER])) == 32
    first = load(write_lines(tmp_path / "1.jsonl", [{"messages": [USER], "uuid": "a"}, {"messages": [SYSTEM, USER]}]))
    second = load(
        write_lines(tmp_path / "2.jsonl", [{"messages": [SYSTEM, USER]}, {"messages": [USER, ANSWER], "x": 1}])
    )
    assert [c.cid for c in first[0]] == [c.cid for c in second[0]]


def test_the_split_is_by_content_and_comes_before_the_choice(tmp_path: Path) -> None:
    items = [{"messages": [user(f"q {i}")], "category": "a" if i % 4 else "b"} for i in range(2000)]
    train, held_out, counts = load(write_lines(tmp_path / "a.jsonl", items), held_out_fraction=0.1)
    assert 150 < len(held_out) < 250 and len(train) + len(held_out) == 2000
    random.Random(0).shuffle(items)
    few, held_again, counts = load(
        write_lines(tmp_path / "b.jsonl", items[:1900]), held_out_fraction=0.1, max_conversations=101, max_held_out=20
    )
    texts = {c.cid for c in held_out}
    assert {c.cid for c in held_again} < texts and not {c.cid for c in few} & texts
    assert len(few) == 101 and len(held_again) == 20 and counts["not_chosen"] == 1900 - 121
    assert [c.cid for c in few] == sorted(c.cid for c in few)
    assert sum(c.category == "b" for c in few) in (25, 26)
    with pytest.raises(ValueError, match=r"held_out_fraction must be in \[0, 1\), got 1.5"):
        load(tmp_path / "a.jsonl", held_out_fraction=1.5)


def test_the_choice_keeps_the_ratio_and_takes_the_lowest_ids(tmp_path: Path) -> None:
    sizes = Counter(a=10, b=10, c=50)
    assert quotas(sizes, 12) == {"a": 2, "b": 2, "c": 8}  # of 1.71, 1.71, 8.57
    assert quotas(sizes, 70) == quotas(sizes, None) == sizes and quotas(sizes, 0).total() == 0
    items = [{"messages": [user(f"q {i}")], "category": "abc"[min(i % 7, 2)]} for i in range(70)]
    path = write_lines(tmp_path / "a.jsonl", items)
    made, chosen = load(path)[0], load(path, max_conversations=12)[0]
    for name, number in (("a", 2), ("b", 2), ("c", 8)):
        of_name = [c for c in made if c.category == name]
        assert [c for c in chosen if c.category == name] == of_name[:number]


def test_of_equal_rows_the_first_one_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they reach the disk at different times, and whatever bucket they fall into."""
    monkeypatch.setattr(parquet, "BUFFER_ROWS", 7)
    items = [{"messages": [user(f"q {i % 40}")], "uuid": f"{i}"} for i in range(120)]
    train, _, counts = load(write_lines(tmp_path / "a.jsonl", items))
    assert sorted(int(c.uuid) for c in train) == list(range(40))
    assert [c.cid for c in train] == sorted(c.cid for c in train) and counts["duplicate"] == 80


def test_nemotron_takes_its_four_splits_and_collapses_reasoning_twins(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"gated(.|\n)*hf download(.|\n)*huggingface-cli download(.|\n)*prompts.data_dir"
    ):
        load_conversations(PromptConfig(source="nemotron_v2"))
    for split in ("stem", "chat", "math", "code", "multilingual_ja"):
        twins = [
            {"uuid": f"{split}{i}{on}", "license": "cc-by-4.0", "generator": "g", "version": "v2", "category": "other"}
            | {"reasoning": on, "messages": [SYSTEM, user(f"{split} {i} /no_think"), ANSWER]}
            for i in range(5)
            for on in ("on", "off")
        ]
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(twins), folder / f"{split}-00000-of-00001.parquet")
    config = PromptConfig(source="nemotron_v2", data_dir=str(tmp_path), held_out_fraction=0.0)
    train, _, counts = load_conversations(config)
    assert counts["rows"] == 40 and counts["duplicate"] == 20 and counts["with_soft_switch"] == len(train) == 20
    assert {c.category for c in train} == {"stem", "chat", "math", "code"} and {c.source for c in train} == {
        "nemotron_v2"
    }
    (folder / "math-00000-of-00001.parquet").rename(folder / "math-00001-of-00003.parquet")
    part = r"downloaded in part: 2 files are missing, the first is math-00000-of-00003\.parquet"
    with pytest.raises(ValueError, match=part):
        load_conversations(config)
    (folder / "math-00001-of-00003.parquet").unlink()
    with pytest.raises(ValueError, match=r"has no files math-\*\.parquet"):
        load_conversations(config)


def test_the_standard_library_is_split_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(200):
        body = f'def f{{0}}(x):\n    """Return {i}."""\n    y = {i}\n    return y\n'
        (tmp_path / f"m{i}.py").write_text(body.format(i) + body.format("_twin"))
    monkeypatch.setattr(stdlib, "stdlib_root", lambda: tmp_path)
    train, held_out, counts = load_conversations(PromptConfig(source="stdlib", held_out_fraction=0.5))
    assert counts["rows"] == counts["train"] + counts["held_out"] == 400
    held_modules = {c.uuid.split(".")[0] for c in held_out}
    assert held_modules == {f"m{i}" for i in range(200) if stdlib.is_held_out(f"m{i}")} != set()
    assert not held_modules & {c.uuid.split(".")[0] for c in train}
    assert train[0].category == "code" and train[0].source == "stdlib"
    assert train[0].messages[0]["content"].startswith("def f") and '"""Return' in train[0].messages[0]["content"]


def group_rows(path: Path, group: int) -> int:
    return pq.ParquetFile(path).metadata.row_group(group).num_rows


def test_row_groups_are_bounded_in_bytes_and_a_huge_row_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "GROUP_BYTES", 100_000)
    longest = max_chars = 394_565  # characters of the longest row of a public chat corpus
    items = [{"messages": [user(f"{i} " + "x" * 1000)]} for i in range(300)] + [{"messages": [user("y" * longest)]}]
    path = write_lines(tmp_path / "a.jsonl", items)
    counts = prepare_conversations(
        PromptConfig(source=str(path), max_chars=max_chars), tmp_path / "train.parquet", tmp_path / "held_out.parquet"
    )
    found = read_conversations(tmp_path / "train.parquet") + read_conversations(tmp_path / "held_out.parquet")
    assert max(len(c.messages[0]["content"]) for c in found) == longest and len(found) == counts["rows"] == 301
    file = pq.ParquetFile(tmp_path / "train.parquet")
    groups = [file.read_row_group(i) for i in range(file.num_row_groups)]
    assert len(groups) > 3 and all(group.nbytes <= 100_000 or group.num_rows == 1 for group in groups)


def test_conversations_survive_a_round_trip_in_order_and_by_range(tmp_path: Path) -> None:
    made = [
        Conversation(conversation_id([user(f"ä {i}")]), [SYSTEM, user(f"ä {i}")], "s", "c", f"{i}") for i in range(5000)
    ]
    path = tmp_path / "new" / "prompts.parquet"
    write_conversations(path, made)
    ordered = sorted(made, key=lambda c: c.cid)
    assert read_conversations(path) == ordered
    for start, stop in ((0, 1), (2040, 2060), (2048, 4096), (4999, 5000), (4000, 5000), (7, 7)):
        assert read_conversations(path, start, stop) == ordered[start:stop]
    assert [file.name for file in path.parent.iterdir()] == ["prompts.parquet"]
    assert [group_rows(path, i) for i in range(3)] == [2048, 2048, 904]
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ValueError, match="not a file of conversations"):
        read_conversations(path)
