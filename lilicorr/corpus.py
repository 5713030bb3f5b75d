"""The training set: regenerated turns as one immutable, memory-mapped table of tokens, and its sampler.

Place in the flow: `pipelines/regenerate.py` leaves Parquet shards with the tokens exactly as the target
made them; `build_training_set` lays them out once; `training` takes rows by number. The border between
prompt and completion is the loss mask, nothing is tokenised again. The sampler has no state: a step number
gives its rows, so resume is one integer and no batch depends on how many workers there are.

Paper: section 4.1 (training data), Table 4 (length 3,072, batch 64).

A folder holds `tokens.npy` int32 [sum of lengths], `mask.npy` bool of the same length, `offsets.npy`
int64 [rows + 1], `vocab.npy` int32 (the ids that occur) and `meta.json`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from lilicorr.blocks import TrainBatch
from lilicorr.folder import new_folder

FORMAT = 1
ARRAYS = {"tokens": np.int32, "mask": np.bool_, "offsets": np.int64, "vocab": np.int32}  # a .npy file each
LAYOUTS = ("turn", "conversation")
COLUMNS = ["cid", "turn", "prompt_ids", "completion_ids", "finish_reason", "fingerprint"]


@dataclass(frozen=True)
class Turn:
    """One regenerated answer as it stands in a shard."""

    cid: str
    index: int
    prompt: np.ndarray  # int32
    completion: np.ndarray  # int32, with the stop token where there was one


@dataclass(frozen=True)
class Row:
    """One training row before it is laid out."""

    cid: str
    turn: int
    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T]


def build_training_set(
    shards: Sequence[Path], folder: Path, max_length: int, layout: str, source: str = ""
) -> dict[str, Any]:
    """Lay out the regenerated `shards` as a training set in `folder` and return its report.

    `layout="turn"` makes one row of every answer; `"conversation"` makes one row of every conversation:
    the last prompt and answer, with the earlier answers supervised where their tokens stand unchanged in
    that prompt. Rows are cut on the right to `max_length`; a row without two adjacent supervised tokens
    holds no block and is dropped. The order is (cid, turn), whatever the order of the shards. `source`
    identifies the shards (a hash of their manifests) and is kept in `meta.json`.

    Raises ValueError for an unknown layout, a repeated (cid, turn), shards of different regeneration runs,
    or if no row is left.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2, got {max_length}")
    counts: Counter[str] = Counter()
    runs: set[str] = set()
    lengths, ranks = _survey(shards, max_length, layout, counts, runs)
    with new_folder(folder) as aside:
        meta = _lay_out(aside, lengths, ranks, shards, max_length, layout)
        names = ("turns", "conversations", "truncated", "spans_found", "spans_missing")
        drops = {key.removeprefix("dropped_"): n for key, n in sorted(counts.items()) if key.startswith("dropped_")}
        report = {name: counts[name] for name in names} | {"dropped": drops}
        report |= {key: meta[key] for key in ("rows", "tokens", "supervised_tokens", "longest_row", "vocabulary")}
        meta |= {"source": source, "regeneration": sorted(runs), "report": report}
        (aside / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return report


def _survey(
    shards: Sequence[Path], max_length: int, layout: str, counts: Counter[str], runs: set[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the rows in their final order, and the place there of every row as the shards give them.

    Refuses an empty set, mixed regeneration runs and rows that stand twice. Memory holds one shard and some 130
    bytes a row: 56 of them the rows' keys and places, the rest while these are compared.
    """
    keys: list[np.ndarray] = [np.empty(0, dtype="S1")]
    found: list[np.ndarray] = [np.empty((0, 3), dtype=np.int64)]  # turn, shard, length
    for number, shard in enumerate(shards):
        rows = [(r.cid, r.turn, number, len(r.tokens)) for r in _shard_rows(shard, max_length, layout, counts, runs)]
        if rows:
            keys.append(np.array([cid.encode() for cid, *_ in rows]))
            found.append(np.array([values for _, *values in rows], dtype=np.int64))
    cids, (turns, numbers, lengths) = np.concatenate(keys), np.concatenate(found).T
    del keys, found
    if not len(cids):
        raise ValueError(f"no training row in {len(shards)} shards: {dict(counts)}")
    if len(runs) > 1:
        raise ValueError(f"shards of different regeneration runs: {', '.join(sorted(runs))}")
    order = np.lexsort((numbers, turns, cids))
    first, second = order[:-1], order[1:]
    repeated = np.flatnonzero((cids[first] == cids[second]) & (turns[first] == turns[second]))
    for one, other in ((first[place], second[place]) for place in repeated):
        if numbers[one] != numbers[other]:
            where = f"{shards[numbers[one]]} and in {shards[numbers[other]]}"
            raise ValueError(f"conversation {cids[one].decode()} turn {turns[one]} stands in {where}")
    if len(repeated):
        raise ValueError(f"{len(repeated)} rows stand twice in one shard")
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return lengths[order], ranks


def _lay_out(
    folder: Path, lengths: np.ndarray, ranks: np.ndarray, shards: Sequence[Path], max_length: int, layout: str
) -> dict[str, Any]:
    """Write the arrays, one shard in memory at a time; every row goes straight to its final place.

    The files are written rather than mapped, so that what is written does not count as this process's memory.
    """
    offsets = np.zeros(len(lengths) + 1, dtype=ARRAYS["offsets"])
    np.cumsum(lengths, out=offsets[1:])
    total, done, num_supervised = int(offsets[-1]), 0, 0
    present = np.zeros(1, dtype=np.bool_)
    with (
        _new_array(folder / "tokens.npy", ARRAYS["tokens"], total) as tokens,
        _new_array(folder / "mask.npy", ARRAYS["mask"], total) as mask,
    ):
        start = tokens.tell(), mask.tell()
        for shard in shards:
            rows = list(_shard_rows(shard, max_length, layout, Counter(), set()))
            places = ranks[done : done + len(rows)]
            done += len(rows)
            by_place = np.argsort(places)
            for run in np.split(by_place, np.flatnonzero(np.diff(places[by_place]) != 1) + 1):
                if not len(run):  # a shard without a row
                    continue
                ids = np.concatenate([rows[index].tokens for index in run])
                supervised = np.concatenate([rows[index].mask for index in run])
                for file, begin, values in zip((tokens, mask), start, (ids, supervised)):
                    file.seek(begin + int(offsets[places[run[0]]]) * values.itemsize)
                    file.write(values.data)
                num_supervised += int(np.count_nonzero(supervised))
                present = np.pad(present, (0, max(0, int(ids.max()) + 1 - len(present))))
                present[ids] = True
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "vocab.npy", np.flatnonzero(present).astype(ARRAYS["vocab"]))
    return {
        "format": FORMAT,
        "rows": len(lengths),
        "tokens": total,
        "supervised_tokens": num_supervised,
        "vocabulary": int(np.count_nonzero(present)),
        "max_length": max_length,
        "longest_row": int(lengths.max()),
        "layout": layout,
        "content": content_hash(folder),
    }


def _new_array(path: Path, kind: type, size: int) -> BinaryIO:
    """A new .npy file of `size` zeros, open behind its header."""
    file = path.open("wb")
    descr = np.lib.format.dtype_to_descr(np.dtype(kind))
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (size,)})
    file.truncate(file.tell() + size * np.dtype(kind).itemsize)
    return file


def content_hash(folder: Path, block: int = 1 << 24) -> str:
    """16 hex digits of a training set's arrays, read in blocks and without the files' headers."""
    digest = hashlib.blake2b(digest_size=8)
    for name in ARRAYS:
        with (folder / f"{name}.npy").open("rb") as file:
            np.lib.format.read_magic(file)
            np.lib.format.read_array_header_1_0(file)
            while chunk := file.read(block):
                digest.update(chunk)
    return digest.hexdigest()


def _shard_rows(shard: Path, max_length: int, layout: str, counts: Counter[str], runs: set[str]) -> Iterator[Row]:
    """The training rows of one shard; counts what is cut, found and dropped, and collects run fingerprints."""
    conversations = _read_shard(shard, counts, runs)
    counts["conversations"] += len(conversations)
    for turns in conversations.values():
        if layout == "turn":
            rows = [_turn_row(turn) for turn in turns]
        else:
            rows = [_conversation_row(turns, counts)]
        for row in rows:
            if len(row.tokens) > max_length:
                counts["truncated"] += 1
                row = Row(row.cid, row.turn, row.tokens[:max_length], row.mask[:max_length])
            if np.any(row.mask[:-1] & row.mask[1:]):
                yield row
            else:
                counts["dropped_no_supervised_pair"] += 1


def _read_shard(shard: Path, counts: Counter[str], runs: set[str]) -> dict[str, list[Turn]]:
    """The usable turns of a shard by conversation, each conversation in the order of its turns."""
    table = pq.read_table(shard, columns=COLUMNS).combine_chunks()
    runs.update(table["fingerprint"].unique().to_pylist())
    cids, turns = table["cid"].to_pylist(), table["turn"].to_pylist()
    reasons = table["finish_reason"].to_pylist()
    prompts, completions = _id_lists(table["prompt_ids"]), _id_lists(table["completion_ids"])
    conversations: dict[str, list[Turn]] = {}
    for cid, turn, reason, prompt, completion in zip(cids, turns, reasons, prompts, completions):
        counts["turns"] += 1
        if reason == "error":
            counts["dropped_error"] += 1
        elif len(completion) == 0:
            counts["dropped_empty"] += 1
        else:
            conversations.setdefault(cid, []).append(Turn(cid, turn, prompt, completion))
    for conversation in conversations.values():
        conversation.sort(key=lambda turn: turn.index)
    return conversations


def _id_lists(column: Any) -> list[np.ndarray]:
    """The rows of a list<int32> column as views of one array."""
    lists: list[np.ndarray] = []
    for chunk in column.chunks:
        values = chunk.flatten().to_numpy(zero_copy_only=False)
        ends = np.cumsum(chunk.value_lengths().to_numpy(zero_copy_only=False)).tolist()
        lists += [values[start:end] for start, end in zip([0, *ends], ends)]
    return lists


def _turn_row(turn: Turn) -> Row:
    tokens = np.concatenate([turn.prompt, turn.completion]).astype(np.int32)
    return Row(turn.cid, turn.index, tokens, np.arange(len(tokens)) >= len(turn.prompt))


def _conversation_row(turns: list[Turn], counts: Counter[str]) -> Row:
    """The last turn's row with the earlier answers supervised too.

    A template may render an earlier answer's frame differently once it is history (Qwen3 drops the empty
    think block), so each answer is looked for at or after the place where the two prompts part.
    """
    row = _turn_row(turns[-1])
    prompt, mask = turns[-1].prompt, row.mask
    for turn in turns[:-1]:
        start = _find(prompt, turn.completion, _common_prefix(prompt, turn.prompt))
        if start is None:
            counts["spans_missing"] += 1
        else:
            counts["spans_found"] += 1
            mask[start : start + len(turn.completion)] = True
    return row


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """How many leading tokens agree."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def _find(tokens: np.ndarray, span: np.ndarray, start: int) -> int | None:
    """The first place at or after `start` where `span` stands in `tokens`."""
    for place in start + np.flatnonzero(tokens[start : len(tokens) - len(span) + 1] == span[0]):
        if np.array_equal(tokens[place : place + len(span)], span):
            return int(place)
    return None


class TrainingSet:
    """A built training set, memory-mapped and read-only; row numbers are the sample ids."""

    def __init__(self, tokens: np.ndarray, mask: np.ndarray, offsets: np.ndarray, vocab: np.ndarray, meta: dict):
        self.tokens, self.mask, self.offsets, self.vocab, self.meta = tokens, mask, offsets, vocab, meta
        self.lengths = np.diff(offsets)

    @classmethod
    def open(cls, folder: Path) -> TrainingSet:
        """Open `folder`; raises ValueError that names the file if one is missing, cut off or does not fit."""
        folder = Path(folder)
        if not (folder / "meta.json").is_file():
            raise ValueError(f"{folder} is not a training set: meta.json is missing")
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            found = meta.get("format")
            if found != FORMAT:
                raise ValueError(f"format must be {FORMAT}, got {found!r}")
            counts = [meta[name] for name in ("tokens", "tokens", "rows", "vocabulary")]
            if not all(type(count) is int for count in counts) or not {"source", "content"} <= meta.keys():
                raise ValueError("a count is no integer, or source or content is missing")
        except (ValueError, AttributeError, KeyError) as error:
            raise ValueError(f"{folder / 'meta.json'} is damaged: {error}") from error
        arrays = {}
        for (name, kind), count in zip(ARRAYS.items(), counts):
            path, size = folder / f"{name}.npy", count + (name == "offsets")
            try:
                arrays[name] = np.load(path, mmap_mode="r")
            except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
                raise ValueError(f"{path} is missing or cut off: {error}") from error
            if arrays[name].shape != (size,) or arrays[name].dtype != kind:
                is_there = f"{arrays[name].shape} entries of {arrays[name].dtype.str}"
                raise ValueError(f"{path} holds {is_there}, meta.json says {size}, of {np.dtype(kind).str}")
        offsets = np.array(arrays["offsets"])
        if offsets[0] != 0 or offsets[-1] != meta["tokens"] or np.any(np.diff(offsets) < 2):
            raise ValueError(f"{folder / 'offsets.npy'} does not ascend from 0 to {meta['tokens']}")
        return cls(arrays["tokens"], arrays["mask"], offsets, arrays["vocab"], meta)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, sample_ids: Sequence[int]) -> TrainBatch:
        """The rows [R] as one batch, right-padded with id 0 to the longest of them."""
        lengths = self.lengths[list(sample_ids)]
        ids = np.zeros((len(sample_ids), int(lengths.max())), dtype=np.int64)
        mask = np.zeros(ids.shape, dtype=np.bool_)
        for row, (sample, length) in enumerate(zip(sample_ids, lengths)):
            start = self.offsets[sample]
            ids[row, :length] = self.tokens[start : start + length]
            mask[row, :length] = self.mask[start : start + length]
        return TrainBatch(
            input_ids=torch.from_numpy(ids),
            loss_mask=torch.from_numpy(mask),
            lengths=torch.from_numpy(lengths.astype(np.int64)),
            sample_ids=torch.tensor(list(sample_ids), dtype=torch.int64),
        )

    def num_anchors(self, sample_ids: Sequence[int], most: int) -> np.ndarray:
        """How many anchors each of the rows [R] has: its pairs of adjacent supervised tokens, at most `most`; int64."""
        masks = (self.mask[self.offsets[row] : self.offsets[row + 1]] for row in sample_ids)
        return np.array([min(most, int(np.count_nonzero(mask[:-1] & mask[1:]))) for mask in masks])

    def vocab_ids(self) -> Tensor:
        """The target ids that occur anywhere in the set, ascending, int64."""
        return torch.from_numpy(self.vocab.astype(np.int64))


@dataclass(frozen=True)
class Sampler:
    """Which rows a step trains on, as a pure function of the step number.

    An epoch is a permutation keyed by (seed, epoch), cut into batches of `batch_size`. The last batch of an
    epoch is smaller where the rows do not divide evenly: no batch spans two epochs, no row is left out.
    """

    num_rows: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.batch_size < 1:
            raise ValueError(f"a sampler needs rows and a batch size, got {self.num_rows} and {self.batch_size}")

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch, the smaller last one included."""
        return math.ceil(self.num_rows / self.batch_size)

    def num_steps(self, epochs: float) -> int:
        """Steps of that many epochs, at least one."""
        return max(1, round(epochs * self.steps_per_epoch))

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of the rows in `epoch`."""
        return _permutation(self.num_rows, self.seed, epoch)

    def rows(self, step: int) -> tuple[int, list[int]]:
        """The epoch of `step` (counted from 0) and the rows of its batch."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        start = batch * self.batch_size
        return epoch, self.order(epoch)[start : start + self.batch_size].tolist()


@functools.lru_cache(maxsize=2)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_rows)
