"""Small regeneration shards for tests, with the columns that `pipelines/regenerate.py` writes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lilicorr.provenance import write_json
from pipelines.shards import FORMAT, TURNS


def turn(cid: str, index: int, prompt: list[int], completion: list[int], **changes: Any) -> dict[str, Any]:
    """One shard row; `changes` override columns."""
    return {
        "cid": cid,
        "turn": index,
        "n_turns": index + 1,
        "source_split": "code",
        "source_uuid": cid,
        "messages": [{"role": "user", "content": "?"}],
        "prompt_ids": prompt,
        "completion_ids": completion,
        "finish_reason": "stop",
        "completion_len": len(completion),
        "attempt": 1,
        "engine": "test",
        "fingerprint": "run",
        "created_ns": 0,
        **changes,
    }


def write_shard(path: Path, turns: list[dict[str, Any]]) -> Path:
    """Write `turns` as one shard."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(turns, schema=TURNS), path)
    return path


def write_regeneration(folder: Path, turns: list[dict[str, Any]], shard_size: int) -> None:
    """Write `turns`, one per conversation, as a finished regeneration with plan and manifests."""
    shards = []
    for start in range(0, len(turns), shard_size):
        part = turns[start : start + shard_size]
        shards.append([part[0]["cid"], start, start + len(part), len(part)])
        name = f"shards/{part[0]['cid']}.parquet"
        data = write_shard(folder / name, part).read_bytes()
        record = {"rows": len(part), "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        write_json(folder / "manifest" / f"{part[0]['cid']}.json", {"format": FORMAT, **record})
    plan = {"prompts": "", "shard_size": shard_size, "num_rows": len(turns), "num_duplicates": 0, "shards": shards}
    write_json(folder / "plan.json", {"format": FORMAT, **plan})
