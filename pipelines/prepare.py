"""Prepare the target and the prompts: the first stage.

Place in the flow: everything behind it reads `prepare/`: `target.json` (what the target is, by content),
`prompts.parquet` and `held_out.parquet` (conversations without answers, ordered by content id) and
`counts.json` (every row of the source accounted for).

    python pipelines/prepare.py --profile demo
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lilicorr import wheels
from lilicorr.config import PipelineConfig, TargetConfig
from lilicorr.folder import remove_unfinished
from lilicorr.provenance import sha256_tree, write_json

logger = logging.getLogger(__name__)

PROBE = [{"role": "user", "content": "What is a lattice?"}]


def run(config: PipelineConfig) -> dict[str, Any]:
    """Make the target available, write target.json, both prompt files and counts.json; returns the counts.

    Raises ValueError for a missing target, a mask token outside its embedding, a tokenizer without a usable
    chat template, an unreadable source, or a source that leaves nothing to train or to evaluate on.
    """
    from lilicorr.prompts import prepare_conversations

    folder = config.directory / "prepare"
    fetched = wheels.download(needed_packages(config))
    logger.info("packages fetched: %s", ", ".join(fetched) or "none")
    target = describe_target(config.target)
    write_json(folder / "target.json", target)
    remove_unfinished(folder)
    counts = prepare_conversations(config.prompts, folder / "prompts.parquet", folder / "held_out.parquet")
    if not counts["held_out"] and "held_out" in config.evaluate.sets:
        raise ValueError(f"no held-out prompt among {counts['rows']} rows; raise prompts.held_out_fraction")
    write_json(folder / "counts.json", counts)
    logger.info("prompts: %s", ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return {"mask_token_id": target["mask_token_id"], **counts}


def needed_packages(config: PipelineConfig) -> list[str]:
    """The pinned packages that the profile reads data from."""
    groups = []
    if config.prompts.source == "packages" and config.prompts.data_dir is None:
        groups += ["prompts", "benchmarks"]  # prompts that overlap with a benchmark are dropped
    elif any(name != "held_out" and "=" not in name for name in config.evaluate.sets):  # name=file is the user's own
        groups.append("benchmarks")
    return [package for group in groups for package in wheels.GROUPS[group]]


def describe_target(config: TargetConfig) -> dict[str, Any]:
    """What identifies the target: its sizes, mask token, and hashes of its tokenizer, template and files.

    No path of this machine is in it, so equal targets give equal descriptions. The weights are not loaded.
    """
    from transformers import AutoTokenizer

    from lilicorr.chat import render_prompt
    from lilicorr.target import model_config, names_of, resolve_mask_token, resolve_target

    name, model = resolve_target(config), model_config(config)
    tokenizer = AutoTokenizer.from_pretrained(name, revision=config.revision)
    probe = render_prompt(tokenizer, PROBE, config.template_kwargs)
    return {
        "source": None if config.path is not None else config.source,  # a folder may move, see files_hash
        **names_of(model, tokenizer, config.revision),
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "vocab": model.vocab_size,
        "tokenizer_size": len(tokenizer),
        "mask_token_id": resolve_mask_token(config, tokenizer, model.vocab_size),
        "eos_token_id": tokenizer.eos_token_id,
        "probe_tokens": len(probe),
        "files_hash": sha256_tree(name) if Path(name).is_dir() else None,
    }


if __name__ == "__main__":
    from pipelines.stage import main

    main(run, "prepare")
