"""Shards of a regeneration run: the plan, the commit protocol, the accounting. No Ray, no torch.

Place in the flow: `pipelines/regenerate.py` schedules shards over actors; everything that makes a run
restartable is here and works from files alone.

    plan.json                   which rows of prompts.parquet form which shard; written once
    _run.json                   fingerprint of everything that decides the tokens; a run with another one refuses
    shards/<id>.parquet         one row per regenerated turn, ordered by (cid, turn)
    dead_letter/<id>.parquet    one row per conversation that could not be answered, where there is any
    manifest/<id>.json          counts and sha256 of both, written last

A shard is done if and only if its manifest agrees with its files. All files are written aside and renamed,
so a crash at any point leaves a shard done or not done, and what is not done is made again as a whole.
A shard given up because its engine kept dying is dead for this driver; the next one opens it again.
If two workers commit the same shard, the first one counts; should they write at the same time, which the queue
of `pipelines/shard_queue.py` prevents, any interleaving ends in files that agree with their manifest or in a
shard that is not done.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lilicorr.config import fingerprint
from lilicorr.folder import ASIDE
from lilicorr.parquet import row_groups
from lilicorr.prompts import Conversation, read_conversations
from lilicorr.provenance import sha256_file, write_atomic, write_json

if TYPE_CHECKING:  # its module needs torch, this one does not
    from lilicorr.generator import ConversationResult

FORMAT = 1
ENGINE_DIED = "EngineDied"  # the dead letters of a shard that was given up: no property of its conversations
KILLED_ENGINE = "KilledEngine"  # of a conversation that was alone with its engine when that died
MOST_ATTEMPTS = 127  # that a column of int8 can number
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
NAMES = pa.dictionary(pa.int32(), pa.string())
TURNS = pa.schema(
    [
        ("cid", pa.string()),
        ("turn", pa.int16()),
        ("n_turns", pa.int16()),
        ("source_split", NAMES),
        ("source_uuid", pa.string()),
        ("messages", MESSAGES),  # the regenerated history up to and with this answer
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),  # as the engine made them, stop token included
        ("finish_reason", NAMES),  # stop | length
        ("completion_len", pa.int32()),
        ("attempt", pa.int8()),
        ("engine", pa.string()),
        ("fingerprint", pa.string()),
        ("created_ns", pa.int64()),
    ]
)
DEAD_LETTERS = pa.schema(
    [
        ("cid", pa.string()),
        ("turn", pa.int16()),  # the one that failed
        ("error", NAMES),
        ("message", pa.string()),
        ("source_split", NAMES),
        ("source_uuid", pa.string()),
        ("attempt", pa.int8()),
        ("fingerprint", pa.string()),
        ("created_ns", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Shard:
    """Rows `start` to `stop` of the prompt file: the unit of commit and of retry."""

    id: str  # content id of its first conversation
    start: int
    stop: int
    num_conversations: int  # rows without the repeated ones


@dataclass(frozen=True)
class Plan:
    """All shards of a prompt file, in the order of content ids."""

    prompts: str  # hash of the content ids
    shard_size: int
    num_rows: int
    num_duplicates: int  # rows that repeat the content id before them
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Run:
    """Where a regeneration run lives and what its rows are marked with."""

    folder: Path
    fingerprint: str
    engine: str  # name and version


def make_plan(cids: Iterable[str], shard_size: int) -> Plan:
    """Cut ascending content ids into shards of `shard_size` different ones; no id but the shards' first is kept.

    Raises ValueError for no ids, unordered ones or a size below 1.
    """
    if shard_size < 1:
        raise ValueError(f"regenerate.shard_size must be at least 1, got {shard_size}")
    starts: list[tuple[str, int]] = []  # first id and row of each shard
    unique: list[int] = []  # different ids of each shard
    digest = hashlib.blake2b(digest_size=16)
    row, previous = -1, ""
    for row, cid in enumerate(cids):
        if cid < previous:
            raise ValueError(f"prompts are not ordered by content id: row {row} has {cid} after {previous}")
        repeated = row > 0 and cid == previous
        if not repeated and (not starts or unique[-1] == shard_size):
            starts.append((cid, row))
            unique.append(0)
        unique[-1] += not repeated
        digest.update((f"\n{cid}" if row else cid).encode())
        previous = cid
    if not starts:
        raise ValueError("there are no prompts to regenerate")
    ends = [*(start for _, start in starts[1:]), row + 1]
    shards = tuple(Shard(cid, start, end, number) for (cid, start), end, number in zip(starts, ends, unique))
    return Plan(digest.hexdigest(), shard_size, row + 1, row + 1 - sum(unique), shards)


def _read_cids(prompts: Path) -> Iterator[str]:
    for batch in pq.ParquetFile(prompts).iter_batches(columns=["cid"]):
        yield from batch["cid"].to_pylist()


def open_plan(folder: Path, prompts: Path, shard_size: int) -> Plan:
    """The plan of `folder`, made and written if there is none.

    Raises ValueError where the prompts or the shard size are not those it was made for.
    """
    plan = make_plan(_read_cids(prompts), shard_size)
    path = folder / "plan.json"
    if not path.is_file():
        shards = [[shard.id, shard.start, shard.stop, shard.num_conversations] for shard in plan.shards]
        write_json(path, {"format": FORMAT, **vars(plan), "shards": shards})
        return plan
    stored = read_plan(folder)
    for name, what in (("prompts", "the prompt set"), ("shard_size", "regenerate.shard_size")):
        before, now = getattr(stored, name), getattr(plan, name)
        if before != now:
            raise ValueError(
                f"{what} changed since {path} was written ({before}, {stored.num_rows} prompts -> {now}, "
                f"{plan.num_rows} prompts); restore it, or start over with --force"
            )
    return stored


def read_plan(folder: Path) -> Plan:
    """The stored plan; raises ValueError if there is none or it is of another format."""
    path = folder / "plan.json"
    if not path.is_file():
        raise ValueError(f"no regeneration run in {folder}: plan.json is missing")
    values = json.loads(path.read_text(encoding="utf-8"))
    if values.pop("format") != FORMAT:
        raise ValueError(f"{path} is of another format than {FORMAT}; start over with --force")
    return Plan(**{**values, "shards": tuple(Shard(*shard) for shard in values["shards"])})


def open_run(folder: Path, engine: str, parts: dict[str, Any]) -> Run:
    """Start or continue the run of `folder`; `parts` is everything that decides the tokens, by name.

    Raises ValueError that names the parts in which they differ from those the run was started with. What
    killed writers left aside is removed.
    """
    path = folder / "_run.json"
    parts = json.loads(json.dumps({**parts, "engine": engine}))
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))["parts"]
        names = sorted(name for name in before.keys() | parts.keys() if before.get(name) != parts.get(name))
        if names:
            changes = "; ".join(f"{name}: {before.get(name)!r} -> {parts.get(name)!r}" for name in names)
            raise ValueError(f"{folder} holds a run with other settings ({changes}); restore them, or use --force")
    else:
        write_json(path, {"format": FORMAT, "fingerprint": fingerprint(parts), "parts": parts})
    for name in (".", "shards", "dead_letter", "manifest"):
        (folder / name).mkdir(exist_ok=True)
        for leftover in (folder / name).glob(f"{ASIDE}*"):
            leftover.unlink(missing_ok=True)
    return Run(folder, fingerprint(parts), engine)


def read_shard(prompts: Path, shard: Shard) -> list[Conversation]:
    """The different conversations of a shard."""
    conversations = {c.cid: c for c in reversed(read_conversations(prompts, shard.start, shard.stop))}
    assert len(conversations) == shard.num_conversations, f"{prompts} is not the file of the plan, see shard {shard.id}"
    return sorted(conversations.values(), key=lambda conversation: conversation.cid)


def commit(run: Run, shard: Shard, results: Iterable[ConversationResult], attempt: int, seconds: float) -> None:
    """Make a shard's results durable: data, dead letters, manifest; nothing if it is done already.

    An attempt behind the 127th counts as that one.
    """
    ordered = sorted(results, key=lambda result: result.conversation.cid)
    cids = [result.conversation.cid for result in ordered]
    assert len(set(cids)) == len(cids) == shard.num_conversations, f"shard {shard.id}: {len(cids)} results"
    if is_done(run, shard):
        return
    attempt = min(attempt, MOST_ATTEMPTS)
    marks = {"attempt": attempt, "fingerprint": run.fingerprint, "created_ns": time.time_ns()}
    turns = [{**row, **marks, "engine": run.engine} for result in ordered for row in _turn_rows(result)]
    dead = [{**_dead_row(result), **marks} for result in ordered if result.dead]
    manifest = {
        "format": FORMAT,
        "shard": shard.id,
        "fingerprint": run.fingerprint,
        "attempt": attempt,
        "seconds": round(seconds, 3),
        **count(ordered),
        **_write_table(data_path(run.folder, shard), turns, TURNS),
        "dead_letter": None,
    }
    letters = dead_letter_path(run.folder, shard)
    if dead:
        manifest["dead_letter"] = _write_table(letters, dead, DEAD_LETTERS)
    else:
        letters.unlink(missing_ok=True)
    write_json(_manifest_path(run.folder, shard), manifest)


def data_path(folder: Path, shard: Shard) -> Path:
    """The file of a shard's regenerated turns."""
    return folder / "shards" / f"{shard.id}.parquet"


def dead_letter_path(folder: Path, shard: Shard) -> Path:
    """The file of a shard's conversations without an answer; absent where there are none."""
    return folder / "dead_letter" / f"{shard.id}.parquet"


def _turn_rows(result: ConversationResult) -> list[dict[str, Any]]:
    """Rows of the turn table, but for the marks of the run."""
    conversation = result.conversation
    return [
        {
            "cid": conversation.cid,
            "n_turns": result.num_turns,
            "source_split": conversation.category or conversation.source,
            "source_uuid": conversation.uuid,
            "completion_len": len(turn.completion_ids),
            **vars(turn),
        }
        for turn in result.turns
    ]


def _dead_row(result: ConversationResult) -> dict[str, Any]:
    conversation = result.conversation
    source = {"source_split": conversation.category or conversation.source, "source_uuid": conversation.uuid}
    return {"cid": conversation.cid, **vars(result.dead), **source}


def _write_table(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> dict[str, Any]:
    """Write rows as Parquet, atomically; returns what the manifest says of the file."""
    buffer = io.BytesIO()
    with pq.ParquetWriter(buffer, schema, compression="zstd") as writer:
        for group in row_groups(pa.Table.from_pylist(rows, schema=schema)):
            writer.write_table(group)
    data = buffer.getvalue()
    write_atomic(path, data)
    return {"rows": len(rows), "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def count(results: Sequence[ConversationResult]) -> dict[str, Any]:
    """The numbers of a shard's manifest."""
    turns = [(result.conversation, turn) for result in results for turn in result.turns]
    sources: dict[str, Counter[str]] = {}
    for conversation, turn in turns:
        source = sources.setdefault(conversation.category or conversation.source, Counter())
        source.update(turns=1, tokens=len(turn.completion_ids), length=turn.finish_reason == "length")
    return {
        "ok": sum(result.dead is None for result in results),
        "dead": dict(Counter(result.dead.error for result in results if result.dead)),
        "cut": dict(Counter(result.cut for result in results if result.cut)),
        "turns": len(turns),
        "skipped_turns": sum(r.num_turns - len(r.turns) for r in results if r.dead is None),
        "prompt_tokens": sum(len(turn.prompt_ids) for _, turn in turns),
        "completion_tokens": sum(len(turn.completion_ids) for _, turn in turns),
        "sources": {name: dict(source) for name, source in sorted(sources.items())},
        "answer_lengths": sorted(len(turn.completion_ids) for _, turn in turns),
    }


def is_done(run: Run, shard: Shard) -> bool:
    """Whether the shard's manifest is of this run and agrees with its files, byte by byte."""
    manifest = read_manifest(run.folder, shard)
    if manifest is None or manifest["fingerprint"] != run.fingerprint:
        return False
    if manifest["ok"] + sum(manifest["dead"].values()) != shard.num_conversations:
        return False
    letters = manifest["dead_letter"]
    return _agrees(data_path(run.folder, shard), manifest) and (
        letters is None or _agrees(dead_letter_path(run.folder, shard), letters)
    )


def _agrees(path: Path, record: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == record["size"] and sha256_file(path) == record["sha256"]


def read_manifest(folder: Path, shard: Shard) -> dict[str, Any] | None:
    """The shard's manifest, None if there is none or it is not whole."""
    try:
        manifest = json.loads(_manifest_path(folder, shard).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None


def _manifest_path(folder: Path, shard: Shard) -> Path:
    return folder / "manifest" / f"{shard.id}.json"


def missing(run: Run, plan: Plan) -> list[Shard]:
    """The shards still to be made, damaged ones included; files are hashed on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(lambda shard: is_done(run, shard), plan.shards)
        return [shard for shard, is_made in zip(plan.shards, done) if not is_made]


def reopen(run: Run, plan: Plan) -> int:
    """Open the shards again that an earlier driver gave up because their engine died; returns how many.

    Such a shard holds no answers. Dead letters of any other reason would come out the same again and stay.
    """
    given_up = [s for s in plan.shards if ENGINE_DIED in (read_manifest(run.folder, s) or {"dead": ()})["dead"]]
    for shard in given_up:
        _manifest_path(run.folder, shard).unlink()
    return len(given_up)


def verified_shards(folder: Path) -> tuple[list[Path], list[str]]:
    """The committed shards of a finished regeneration and their hashes, each compared with its manifest.

    Raises ValueError if regeneration has not finished, or a shard is missing or not what its manifest says.
    """
    paths, hashes = [], []
    for shard in read_plan(folder).shards:
        path, manifest = data_path(folder, shard), read_manifest(folder, shard)
        if manifest is None:
            raise ValueError(f"regeneration in {folder} has not finished: shard {shard.id} has no manifest")
        if not path.is_file():
            raise ValueError(f"{path} is missing, the manifest of shard {shard.id} says it was written")
        if path.stat().st_size != manifest["size"] or sha256_file(path) != manifest["sha256"]:
            raise ValueError(f"{path} is not the file that the manifest of shard {shard.id} describes")
        paths.append(path)
        hashes.append(manifest["sha256"])
    return paths, hashes
