"""Prompt sources: raw chat rows in, clean conversations with a content id out.

Place in the flow: `pipelines/prepare.py` calls `prepare_conversations` once, which writes them ordered by content
id; regeneration reads them back by row range. Only system and user turns are kept: the target answers every user
turn itself (paper, section 4.1).

What happens to a row, in this order; every drop is counted by its reason:
    roles are mapped (human -> user, gpt -> assistant, developer -> system); content may be a string or a list
    of `{"type": "text"}` parts; an empty system turn is left out; assistant turns are stripped, so a chat that
    ends in one loses nothing and user turns in a row stay separate turns, each to be answered.
    Dropped: no messages, no user turn, null content (the prompt was withheld), empty user turn, content that is
    no text, tool turns, unknown roles, a chat opened by the assistant (its first user turn answers a text we do
    not keep), a system turn that is not first, invalid Unicode, more than `max_chars` characters.
    Special-token text in a content is kept: `chat.render_prompt` encodes it as text.
Duplicates by content id collapse. The split into training and held-out prompts is by content hash (by module
for `stdlib`) and comes before the choice of `max_conversations`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lilicorr import stdlib
from lilicorr.config import PromptConfig
from lilicorr.parquet import BucketSort, bucket_sort, new_table
from lilicorr.rows import corpus_files, iter_rows

logger = logging.getLogger(__name__)

NAMED_SOURCES = ("stdlib", "packages", "nemotron_v2")  # any other source is a path
MAX_TURNS = 2**15 - 1  # a shard counts them in 16 bits
PART = re.compile(r"(?P<split>[a-z]+)-\d{5}-of-(?P<count>\d{5})(?P<end>\..+)")  # the name of a file of a split
NEMOTRON_SPLITS = ("stem", "chat", "math", "code")  # 1,397,187 rows: the paper's corpus
NEMOTRON_REVISION = "Nemotron-Post-Training-Dataset-v2"
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "function": "tool",
}
SOFT_SWITCHES = ("/think", "/no_think")
SYSTEM_CHARS = 80  # of a system turn that count when the frequent ones are logged
MOST_SYSTEMS = 10_000  # different ones that are counted at once
SCHEMA = pa.schema(
    [
        ("cid", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("source", pa.string()),
        ("category", pa.string()),
        ("uuid", pa.string()),
    ]
)
SORTED = pa.schema([*SCHEMA, ("held_out", pa.bool_()), ("soft_switch", pa.bool_()), ("system", pa.string())])


@dataclass(frozen=True)
class Conversation:
    """The turns the target is to answer: an optional system turn, then one user turn or more."""

    cid: str  # 32 hex digits of the content
    messages: list[dict[str, str]]  # role (system, user) and content
    source: str
    category: str
    uuid: str


class Dropped(Exception):
    """A row that is no usable conversation; the argument is the reason it is counted under."""


def conversation_id(messages: list[dict[str, str]], revision: str = "") -> str:
    """32 hex digits of the canonical JSON of the system and user turns and the data set's revision."""
    plain = [[message["role"], message["content"]] for message in messages]
    text = json.dumps([plain, revision], ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def normalise(row: Mapping[str, Any], max_chars: int | None = None) -> list[dict[str, str]]:
    """The system and user turns of a raw row (`messages` or `conversations`).

    Raises Dropped with the reason where the row is not usable.
    """
    raw = row.get("messages")
    if raw is None:
        raw = row.get("conversations")
    if not isinstance(raw, list) or not raw:
        raise Dropped("no_messages")
    turns = [_turn(message) for message in raw]
    roles = [role for role, _ in turns]
    if "tool" in roles:
        raise Dropped("tool_turn")
    if "user" not in roles:
        raise Dropped("no_user_turn")
    if next(role for role in roles if role != "system") == "assistant":
        raise Dropped("assistant_first")
    if "system" in roles[1:]:
        raise Dropped("system_not_first")
    messages = [{"role": role, "content": _text(content)} for role, content in turns if role != "assistant"]
    if any(message["role"] == "user" and not message["content"].strip() for message in messages):
        raise Dropped("empty_user_turn")
    if len(messages) > MAX_TURNS:
        raise Dropped("too_many_turns")
    if max_chars is not None and sum(len(message["content"]) for message in messages) > max_chars:
        raise Dropped("too_long")
    return [message for message in messages if message["content"].strip()]


def _turn(message: Any) -> tuple[str, Any]:
    """Role and raw content of one message in either spelling."""
    if not isinstance(message, Mapping):
        raise Dropped("message_not_an_object")
    name = message.get("role", message.get("from"))
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise Dropped("unknown_role")
    return role, message.get("content", message.get("value"))


def _text(content: Any) -> str:
    """A content as one string; parts are joined without anything between them."""
    if content is None:
        raise Dropped("content_withheld")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise Dropped("content_not_text")
        texts.append(text)
    text = "".join(texts)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Dropped("invalid_unicode") from None
    return text


def prepare_conversations(config: PromptConfig, train: Path, held_out: Path) -> dict[str, int]:
    """Read the configured source and write both files, each ordered by content id; returns the counts.

    `rows` equals the sum of `train`, `held_out`, `not_chosen`, `duplicate` and every `dropped_*`. Of rows with one
    content id the first counts. Memory does not grow with the source: rows go through files beside `train`.

    Raises ValueError for a missing, empty, cut or malformed file, and for a source that leaves nothing.
    """
    if not 0 <= config.held_out_fraction < 1:
        raise ValueError(f"prompts.held_out_fraction must be in [0, 1), got {config.held_out_fraction}")
    counts: Counter[str] = Counter(rows=0, duplicate=0)
    with bucket_sort(train.parent, SORTED, "cid") as ordered:
        usable = _sort_rows(config, ordered, counts)
        sizes = _count_sorted(ordered, counts)
        counts["duplicate"] += usable - sum(size.total() for size in sizes.values())
        limits = {False: config.max_conversations, True: config.max_held_out}
        chosen = {part: quotas(sizes[part], limits[part]) for part in sizes}
        counts["train"], counts["held_out"] = chosen[False].total(), chosen[True].total()
        counts["not_chosen"] = sum(sizes[part].total() - chosen[part].total() for part in sizes)
        accounted = counts["train"] + counts["held_out"] + counts["not_chosen"] + counts["duplicate"]
        accounted += sum(count for name, count in counts.items() if name.startswith("dropped_"))
        assert accounted == counts["rows"], f"{accounted} rows accounted for of {counts['rows']}: {dict(counts)}"
        if not counts["train"]:
            raise ValueError(f"source {config.source!r} left no training conversation: {dict(counts)}")
        with new_table(train, SCHEMA) as add_train, new_table(held_out, SCHEMA) as add_held_out:
            for table in ordered.tables([*SCHEMA.names, "held_out"]):
                for part, add in ((False, add_train), (True, add_held_out)):
                    of_part = table.filter(pc.equal(table["held_out"], part)).select(SCHEMA.names)
                    add(_take_chosen(of_part, chosen[part]))
    return dict(counts)


def _sort_rows(config: PromptConfig, ordered: BucketSort, counts: Counter[str]) -> int:
    """Put the usable rows of the source into `ordered`; counts all rows and the drops, returns the usable ones."""
    revision = NEMOTRON_REVISION if config.source == "nemotron_v2" else ""
    before: Counter[str] = Counter()  # what became of the rows that the source itself dropped
    usable = 0
    for row, held_out in _source_rows(config, before):
        counts["rows"] += 1
        try:
            messages = normalise(row, config.max_chars)
        except Dropped as reason:
            counts[f"dropped_{reason}"] += 1
            continue
        usable += 1
        cid = conversation_id(messages, revision)
        marks = {
            "held_out": _held_out(cid, config.held_out_fraction) if held_out is None else held_out,
            "soft_switch": any(switch in m["content"] for m in messages for switch in SOFT_SWITCHES),
            "system": messages[0]["content"][:SYSTEM_CHARS] if messages[0]["role"] == "system" else "(none)",
        }
        conversation = _conversation(cid, messages, row, config.source)
        ordered.add(vars(conversation) | marks, sum(len(message["content"]) for message in messages))
    ordered.close()
    for name, count in before.items():
        counts["duplicate" if name == "dropped_duplicate" else name] += count
        counts["rows"] += count
    return usable


def _count_sorted(ordered: BucketSort, counts: Counter[str]) -> dict[bool, Counter[str]]:
    """Different conversations by category, of the training part (False) and the held-out one (True)."""
    sizes: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    systems: Counter[str] = Counter()
    for table in ordered.tables(["category", "held_out", "soft_switch", "system"]):
        for category, held_out in zip(table["category"].to_pylist(), table["held_out"].to_pylist()):
            sizes[held_out][category] += 1
        counts["with_soft_switch"] += pc.sum(table["soft_switch"]).as_py() or 0
        systems.update(table["system"].to_pylist())
        if len(systems) > MOST_SYSTEMS:  # the rare ones go, so that the count does not grow with the corpus
            systems = Counter(dict(systems.most_common(MOST_SYSTEMS // 10)))
    logger.info("most frequent system turns: %s", systems.most_common(5))
    return sizes


def _conversation(cid: str, messages: list[dict[str, str]], row: Mapping[str, Any], source: str) -> Conversation:
    named = [row.get("source") or source, row.get("category") or "", row.get("uuid") or row.get("id") or ""]
    return Conversation(cid, messages, *(str(value).encode("utf-8", "replace").decode() for value in named))


def _held_out(cid: str, fraction: float) -> bool:
    """A fixed share of all content ids, independent of the order by which they are chosen."""
    digest = hashlib.blake2b(cid.encode(), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def quotas(sizes: Counter[str], limit: int | None) -> Counter[str]:
    """How many conversations of each category make `limit` in the ratio of `sizes` (largest remainder)."""
    total = sizes.total()
    if limit is None or total <= limit:
        return Counter(sizes)
    shares = {category: divmod(size * limit, total) for category, size in sizes.items()}
    quota = Counter({category: whole for category, (whole, _) in shares.items()})
    by_remainder = sorted(shares, key=lambda category: (-shares[category][1], category))
    quota.update(by_remainder[: limit - quota.total()])
    return quota


def _take_chosen(table: pa.Table, quota: Counter[str]) -> pa.Table:
    """The first rows of every category as far as `quota`, which is used up, allows."""
    chosen = []
    for category in table["category"].to_pylist():
        chosen.append(quota[category] > 0)
        quota[category] -= chosen[-1]
    return table.filter(pa.array(chosen, pa.bool_()))


def _source_rows(config: PromptConfig, dropped: Counter[str]) -> Iterator[tuple[Mapping[str, Any], bool | None]]:
    """Rows of the source, and whether the source itself holds them out (None: decided by content hash).

    Rows that the source does not give are added to `dropped` by reason once it is exhausted.
    """
    if config.source == "stdlib":
        yield from _stdlib_rows()
    elif config.source == "packages":
        from lilicorr import packages

        folder = Path(os.path.expanduser(config.data_dir)) if config.data_dir else None
        counts: Counter[str] = Counter()
        yield from ((row, None) for row in packages.iter_package_rows(folder, counts))
        dropped.update({name: count for name, count in counts.items() if name.startswith("dropped_")})
    elif config.source == "nemotron_v2":
        yield from ((row, None) for row in _nemotron_rows(config.data_dir))
    else:
        for file in corpus_files(Path(os.path.expanduser(config.source))):
            yield from (({"source": file.stem, **row}, None) for row in iter_rows(file))


def _stdlib_rows() -> Iterator[tuple[Mapping[str, Any], bool]]:
    for held_out in (False, True):
        for function in stdlib.prompts(stdlib.stdlib_root(), held_out):
            row = {
                "messages": stdlib.prompt_messages(function),
                "category": "code",
                "uuid": f"{function.module}.{function.name}",
            }
            yield row, held_out


def source_files(config: PromptConfig) -> list[Path]:
    """The user's own files that the rows come from; none where Python or pinned packages bring them.

    Raises ValueError if they are not where the config says; no row is read.
    """
    if config.source == "nemotron_v2":
        return _nemotron_files(config.data_dir)
    return [] if config.source in NAMED_SOURCES else corpus_files(Path(os.path.expanduser(config.source)))


def _nemotron_files(data_dir: str | None) -> list[Path]:
    """The files of the four splits of Nemotron Post-Training Dataset V2."""
    if data_dir is None:
        patterns = " ".join(f"--include 'data/{split}-*'" for split in NEMOTRON_SPLITS)
        raise ValueError(
            "prompts.source nemotron_v2 needs prompts.data_dir: nvidia/Nemotron-Post-Training-Dataset-v2 is gated "
            "and must be fetched by you. Accept its terms on the hub, log in with a token (`hf auth login`, or "
            "`huggingface-cli login` in older versions), run `hf download --repo-type dataset "
            f"nvidia/Nemotron-Post-Training-Dataset-v2 {patterns} --local-dir DIR` (`huggingface-cli download` in "
            "older versions), and pass `--set prompts.data_dir=DIR`."
        )
    files = corpus_files(Path(os.path.expanduser(data_dir)))
    missing = [split for split in NEMOTRON_SPLITS if not any(f.name.startswith(f"{split}-") for f in files)]
    if missing:
        raise ValueError(f"{data_dir} has no files {', '.join(f'{split}-*.parquet' for split in missing)}")
    files = [file for file in files if file.name.partition("-")[0] in NEMOTRON_SPLITS]
    names = {file.name for file in files}
    parts = [match for name in names if (match := PART.fullmatch(name))]
    wanted = {f"{m['split']}-{i:05d}-of-{m['count']}{m['end']}" for m in parts for i in range(int(m["count"]))}
    if cut := sorted(wanted - names):
        raise ValueError(f"{data_dir} was downloaded in part: {len(cut)} files are missing, the first is {cut[0]}")
    return files


def _nemotron_rows(data_dir: str | None) -> Iterator[Mapping[str, Any]]:
    """Rows of those files; the category is the split's name."""
    for file in _nemotron_files(data_dir):
        split = file.name.partition("-")[0]
        yield from ({**row, "source": "nemotron_v2", "category": split} for row in iter_rows(file))


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write conversations that are in memory to Parquet in the order of their content ids, atomically."""
    ordered = sorted(conversations, key=lambda conversation: conversation.cid)
    with new_table(path, SCHEMA) as append:
        append(pa.Table.from_pylist([vars(conversation) for conversation in ordered], schema=SCHEMA))


def read_conversations(path: Path, start: int = 0, stop: int | None = None) -> list[Conversation]:
    """Read rows `start` to `stop` of a file of `write_conversations`; only their row groups are decoded."""
    file = pq.ParquetFile(path)
    if file.schema_arrow != SCHEMA:
        raise ValueError(f"{path} is not a file of conversations: columns {file.schema_arrow.names}")
    stop = file.metadata.num_rows if stop is None else stop
    conversations, first = [], 0
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        if first < stop and first + size > start:
            rows = file.read_row_group(group).slice(max(0, start - first), min(stop, first + size) - max(start, first))
            conversations += [Conversation(**row) for row in rows.to_pylist()]
        first += size
    return conversations
