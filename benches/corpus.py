"""A corpus of the size and shape of the paper's, made up, and an engine that answers it without a model.

Place in the flow: `corpus_scale` runs the pipeline's own bookkeeping on them. Rows have the columns of Nemotron
Post-Training Dataset V2, its four splits in their ratio, and each split's mean size (the data set's card). How a
row's size is divided into turns, system turns, questions and answers is not published; what stands in `SPLITS` is
assumed. One row is as long as the longest of a public chat corpus.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from lilicorr.chat import special_tokens
from lilicorr.generator import Completion
from lilicorr.prompts import quotas


@dataclass(frozen=True)
class Split:
    """Rows of a split, and mean characters of a question, an answer and a system turn."""

    num_rows: int
    question: float
    answer: float
    system: float = 0.0  # mean over all rows: a quarter of them has one
    more_turns: float = 0.0  # chance of every further user turn


SPLITS = {
    "stem": Split(355_000, 450, 1650),
    "chat": Split(627_720, 800, 4900, system=100, more_turns=0.38),
    "math": Split(239_467, 250, 1700),
    "code": Split(175_000, 1100, 4350),
}
NUM_ROWS = sum(split.num_rows for split in SPLITS.values())  # 1,397,187
LONGEST = 394_565  # characters
TWINS = 0.03  # share of rows that repeat the prompt of the row before, as rows with reasoning on and off do
WITHHELD_EVERY = 5000  # rows of which one has no user content
SPREAD = 0.9  # sigma of the lognormal lengths
SYSTEM_SHARE = 0.25
MAX_TURNS = 12
FILE_ROWS = 50_000
BATCH_ROWS = 4096
POOL_CHARS = 1 << 21
WORDS = """a able about above account across add after again all also always among an and answer any are around as ask
back base be because been before begin being below between block both build but by call can case change check class code
come compute could count course data day decide define depend derive describe different do does down each early either
else end energy enough equal error estimate even every example expect explain fact few field file final find first fixed
follow for form found from function general get give given go good great group had half have he her here high him his
idea if in include increase index input instead integer into is it its item just keep key kind know large last later law
least left length less let level light like limit line list little local long loop lower made main make many mass mean
measure method might mode model more most move much must name near need never new next no node none not note now number
object of off often old on once one only open or order other our out output over own part path people per place plan
possible power present prime print problem process product prove question range rate read real reason region result
return right root row rule run same sample say second see sequence set several shape should show side simple since size
small so solve some space start state step still string such sum system table take term test text than that the their
them then theory there these they thing think this those through time to together total true try turn two type under
unit until up use value variable very want was water way we well were what when where which while who why will with
within without word work world would write year you your zero""".split()
ANSWER_TOKENS, ANSWER_SPREAD = 550, 0.8  # median and sigma: a mean of 757 tokens, as the public counts suggest
EMPTY_EVERY = 4000  # answers of which one is empty, which makes its conversation a dead letter
COLUMNS = ("uuid", "license", "generator", "version", "category", "reasoning")


def text_pool(num_chars: int = POOL_CHARS, seed: int = 0) -> str:
    """Sentences of random words, the same ones every time."""
    draw = random.Random(seed)
    parts, length = [], 0
    while length < num_chars:
        words = draw.choices(WORDS, k=draw.randint(4, 24))
        parts.append(" ".join(words).capitalize() + draw.choice((". ", ".\n", "? ", ", ")))
        length += len(parts[-1])
    return "".join(parts)[:num_chars]


def make_corpus(folder: Path, num_rows: int, seed: int = 0) -> int:
    """Write `num_rows` rows to `folder/data/<split>-NNNNN-of-NNNNN.parquet`; returns the bytes of their text."""
    pool = text_pool()
    sizes = quotas(Counter({name: split.num_rows for name, split in SPLITS.items()}), num_rows)
    total = 0
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in sizes.items():
        num_files = -(-rows // FILE_ROWS)
        for number in range(num_files):
            path = folder / "data" / f"{name}-{number:05d}-of-{num_files:05d}.parquet"
            start, stop = (rows * part // num_files for part in (number, number + 1))
            with pq.ParquetWriter(path, _schema(), use_dictionary=list(COLUMNS[1:])) as writer:
                for first in range(start, stop, BATCH_ROWS):
                    ids = range(first, min(first + BATCH_ROWS, stop))
                    draw = np.random.default_rng([seed, zlib.crc32(name.encode()), first])
                    table = _table(name, ids, draw, pool)
                    total += table.nbytes
                    writer.write_table(table)
    return total


def _schema() -> pa.Schema:
    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    return pa.schema([(name, pa.string()) for name in COLUMNS] + [("messages", messages)])


def _table(split: str, ids: range, draw: np.random.Generator, pool: str) -> pa.Table:
    """Rows `ids` of a split."""
    roles: list[str] = []
    contents: list[str | None] = []
    ends, reasoning = [0], []
    asked: list[tuple[str, str | None]] = []
    for number, turns, twin, has_system in zip(
        ids,
        np.minimum(draw.geometric(1 - SPLITS[split].more_turns, len(ids)), MAX_TURNS).tolist(),
        (draw.random(len(ids)) < TWINS).tolist(),
        (draw.random(len(ids)) < SYSTEM_SHARE).tolist(),
    ):
        reasoning.append("on" if twin else "off")
        if not (twin and asked):
            asked = list(_prompt(split, number, turns, has_system, draw, pool))
        for role, content in asked:
            roles.append(role)
            contents.append(content)
            if role == "user":
                roles.append("assistant")
                contents.append(_piece(SPLITS[split].answer, draw, pool))
        ends.append(len(roles))
    messages = pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays([roles, contents], names=["role", "content"]))
    count = len(ids)
    named = [[f"{split}-{number:08d}" for number in ids], ["cc-by-4.0"] * count, ["made up"] * count, ["v2"] * count]
    return pa.Table.from_arrays([*map(pa.array, [*named, [split] * count, reasoning]), messages], schema=_schema())


def _prompt(
    split: str, number: int, turns: int, has_system: bool, draw: np.random.Generator, pool: str
) -> Iterator[tuple[str, str | None]]:
    """System and user turns of a row."""
    if has_system and SPLITS[split].system:
        yield "system", _piece(SPLITS[split].system / SYSTEM_SHARE, draw, pool)
    if split == "chat" and number == 1:
        yield "user", (pool * (1 + LONGEST // len(pool)))[:LONGEST]
        return
    for turn in range(turns):
        if number % WITHHELD_EVERY == WITHHELD_EVERY - 1:
            yield "user", None
        else:
            yield "user", f"{split} {number}.{turn}: {_piece(SPLITS[split].question, draw, pool)}"


def _piece(mean: float, draw: np.random.Generator, pool: str) -> str:
    """A stretch of the pool of lognormal length."""
    length = max(1, min(int(mean * np.exp(draw.normal(-(SPREAD**2) / 2, SPREAD))), LONGEST // 4))
    start = int(draw.integers(len(pool) - length))
    return pool[start : start + length]


class Replay:
    """An engine that answers at once with canned tokens, which follow from the prompt; see Generator.

    Lengths are lognormal around `ANSWER_TOKENS`; one answer in `EMPTY_EVERY` is empty.
    """

    name = "replay"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_model_len: int, max_in_flight: int) -> None:
        special = set(special_tokens(tokenizer).values())
        ids = tokenizer(text_pool(1 << 18, seed=1), add_special_tokens=False, verbose=False)["input_ids"]
        self._pool = [index for index in ids if index not in special]
        lengths = np.random.default_rng(0).normal(np.log(ANSWER_TOKENS), ANSWER_SPREAD, 1 << 16)
        self._lengths = np.maximum(1, np.exp(lengths)).astype(int).tolist()
        self._stop = tokenizer.eos_token_id
        self.max_model_len, self.max_in_flight = max_model_len, max_in_flight
        self._open: list[tuple[int, Completion]] = []

    def submit(self, key: int, prompt_ids: list[int], max_new_tokens: int) -> None:
        """Make the answer; see Generator."""
        self._open.append((key, self.answer(prompt_ids, min(max_new_tokens, self.max_model_len - len(prompt_ids)))))

    def answer(self, prompt_ids: list[int], limit: int) -> Completion:
        """The answer to a prompt in at most `limit` tokens."""
        seed = zlib.crc32(array("i", prompt_ids))
        length = 0 if seed % EMPTY_EVERY == 0 else min(self._lengths[seed % len(self._lengths)], limit)
        start = seed // 7 % (len(self._pool) - length)
        ids = self._pool[start : start + length]
        return Completion(ids, "length") if length == limit else Completion([*ids, self._stop], "stop")

    def poll(self) -> list[tuple[int, Completion]]:
        """All open requests are finished; see Generator."""
        finished, self._open = self._open, []
        return finished
