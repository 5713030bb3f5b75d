"""Checkpoints on the command line: what one is, and the same one in another project's format.

    python -m lilicorr.checkpoint inspect FOLDER
    python -m lilicorr.checkpoint convert SOURCE DESTINATION --to vllm
    python -m lilicorr.checkpoint convert SOURCE DESTINATION --to speculators --target Qwen/Qwen3-8B
    python -m lilicorr.checkpoint convert SOURCE DESTINATION --to sglang --results runs/demo/evaluate/results.json
    python -m lilicorr.checkpoint push FOLDER NAME/REPOSITORY

Place in the flow: behind training and beside it; the formats are in `format`, docs/checkpoints.md says who reads
which. With `--target` (a folder or hub name, or `embedded`) the checkpoint is held against that model, which some
formats need: they hold copies of its tables, or do not say how many layers it has. With `--results` the model card
has the acceptance lengths of that evaluation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lilicorr.checkpoint.description import CONFIG, target_of
from lilicorr.checkpoint.field import read_json
from lilicorr.checkpoint.fit import readers_of
from lilicorr.checkpoint.format import FORMATS, NATIVE, SPECULATORS, TABLES, problem, with_tables
from lilicorr.checkpoint.hub import push_to_hub
from lilicorr.checkpoint.info import INFO, read_info, taus_of
from lilicorr.checkpoint.store import Checkpoint, mask_token, read_checkpoint, write_checkpoint
from lilicorr.config import TARGET_DTYPES, TargetConfig
from lilicorr.heads import HEADS
from lilicorr.target import Target, load_target, names_of


def inspect(folder: Path, target: Target | None = None) -> dict[str, Any]:
    """What a checkpoint is, by name of the property; errors as of `read_checkpoint`."""
    checkpoint = read_checkpoint(folder, target)
    description, spec, shape = checkpoint.description, checkpoint.description.spec, checkpoint.description.shape
    readers = readers_of(folder, checkpoint)
    drafts = "all" if description.num_draft_ids is None else description.num_draft_ids
    return {
        "head": f"{description.head} {description.head_config or ''}".strip(),
        "blocks": f"{spec.layout}, block size {spec.block_size}, drafted width {spec.num_slots}",
        "candidates": spec.num_candidates if HEADS[description.head].format.candidates_field else "none",
        "mask token": spec.mask_token_id,
        "captured layers": f"{list(spec.target_layer_ids)} of the target's {shape.num_target_layers}",
        "drafter": f"{shape.num_layers} layers, width {shape.hidden_size}, {shape.num_heads} heads, "
        f"{shape.num_kv_heads} of keys, {shape.head_dim} wide, MLP {shape.intermediate_size}",
        "vocabulary": f"{shape.vocab_size}, drafted: {drafts}",
        "RoPE": f"base {shape.rope_theta:g}, {shape.yarn or 'plain'}",
        "tensors": f"{len(checkpoint.tensors)}, {sum(t.numel() for t in checkpoint.tensors.values()):,} parameters, "
        f"{description.dtype}, tables of the target: {', '.join(checkpoint.tables) or 'none'}",
        "as it stands for": ", ".join(readers) or "this library only",
        **{name: value for name, value in checkpoint.info.items() if value is not None},
    }


def weight_type(folder: Path) -> str:
    """The type of a checkpoint's weights, in which its target is looked at; fp32 where it does not say."""
    config = read_json(folder / CONFIG)
    named = config.get("dtype") or config.get("torch_dtype")
    return named if named in TARGET_DTYPES else "float32"


def convert(
    source: Path,
    destination: Path,
    form: str,
    target: Target | None = None,
    name: str | None = None,
    revision: str | None = None,
    results: Path | None = None,
    system: str | None = None,
) -> None:
    """Write the checkpoint `source` in another format.

    `target` gives what the source lacks; `name` and `revision` are what it was loaded by, and what the checkpoint
    calls it from now on. `results` of an evaluation give the card the acceptance lengths of `system`, by default the
    run's own. Raises ValueError for a destination that exists, and as `read_checkpoint`, `write_checkpoint` and
    `taus_of` do.
    """
    if destination.exists():
        raise ValueError(f"{destination} exists: convert writes a folder of its own")
    checkpoint = read_checkpoint(source, target)
    wrong = problem(form, checkpoint.description)
    if wrong is not None:
        raise ValueError(wrong)
    if target is not None:
        checkpoint = _with_target(checkpoint, form, target, name, revision)
    if results is not None:
        taus = taus_of(results, system or str(checkpoint.info.get("run")), source)
        checkpoint = replace(checkpoint, info=checkpoint.info | {"taus": taus})
    write_checkpoint(destination, checkpoint, form)


def _with_target(
    checkpoint: Checkpoint, form: str, target: Target, name: str | None, revision: str | None
) -> Checkpoint:
    """The checkpoint with what the format takes from the target.

    Under another name or revision than before, the revision and the hashes are the given target's too.
    """
    info, tables = checkpoint.info, checkpoint.tables
    before = target_of(info)
    named = {"source": name or before.get("source"), "architectures": getattr(target.config, "architectures", None)}
    if named["source"] == before.get("source") and revision in (None, before.get("revision")):
        named = before | {key: value for key, value in named.items() if value}
    else:
        named |= names_of(target.config, target.tokenizer, revision)
    info = info | {"target": named}
    if with_tables(form, checkpoint.description.head) or form == SPECULATORS:
        kind = checkpoint.tensors["fc.weight"].dtype
        tables = {
            key: getattr(target, attribute).detach().to("cpu", kind, copy=True) for key, attribute in TABLES.items()
        }
    return replace(checkpoint, info=info, tables=tables)


def trained_revision(folder: Path, name: str) -> str | None:
    """The revision of the target `name` that the checkpoint says it was trained for, None where it says none."""
    target = read_info(folder).get("target") if (folder / INFO).is_file() else None
    return target.get("revision") if isinstance(target, dict) and target.get("source") == name else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lilicorr.checkpoint", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("inspect", help="what a checkpoint is, and who reads it as it stands")
    shown.add_argument("folder", type=Path)
    converted = commands.add_parser("convert", help="write a checkpoint in another format")
    converted.add_argument("source", type=Path)
    converted.add_argument("destination", type=Path)
    converted.add_argument("--to", required=True, metavar="FORMAT", help=", ".join([NATIVE, *FORMATS, SPECULATORS]))
    converted.add_argument("--results", type=Path, help="results.json of an evaluation, for the model card")
    converted.add_argument("--system", help="whose results; by default the system named like the run")
    pushed = commands.add_parser("push", help="upload a checkpoint to a model hub")
    pushed.add_argument("folder", type=Path)
    pushed.add_argument("repository", help="owner/name")
    pushed.add_argument("--private", action="store_true")
    for command in (shown, converted):
        command.add_argument("--target", help="folder or hub name of the model it was trained for, loaded whole")
        command.add_argument("--revision", help="of the target, on the hub")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; what is wrong with its files, its target or the hub becomes one message."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name, other in (("revision", "target"), ("system", "results")):
        if getattr(options, name, None) is not None and getattr(options, other) is None:
            parser.error(f"--{name} is of --{other}, which is not given")
    try:
        if options.command == "push":
            print(push_to_hub(options.folder, options.repository, options.private))
            return
        target = None
        if options.target is not None:
            folder = options.folder if options.command == "inspect" else options.source
            revision = options.revision or trained_revision(folder, options.target)
            config = TargetConfig(options.target, revision, weight_type(folder), mask_token(folder))
            target = load_target(config)
        if options.command == "inspect":
            for name, value in inspect(options.folder, target).items():
                print(f"{name:<16} {value}")
        else:
            named = (options.target, options.revision)
            convert(options.source, options.destination, options.to, target, *named, options.results, options.system)
            print(f"{options.destination} is a copy in the format {options.to}")
    except (ValueError, OSError, SafetensorError) as error:  # transformers' own are OSErrors, a full disk is either
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
