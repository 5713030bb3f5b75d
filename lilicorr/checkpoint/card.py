"""The model card of a checkpoint: what it is, what it was trained on, how to serve it.

Place in the flow: `store` writes it as `README.md` into every checkpoint folder, from the description and the info
that stand beside it; what is not known is left out. `taus` in the info are acceptance lengths from an evaluation.

Paper: section 4.1 (what was trained on what), Table 5 (the form of the table of acceptance lengths).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from lilicorr.blocks import ANCHOR_FIRST
from lilicorr.checkpoint.description import Description, target_of
from lilicorr.checkpoint.format import SGLANG, VLLM, problem, speculative_config, with_tables
from lilicorr.config import BUILT_IN
from lilicorr.heads import HEADS

CARD = "README.md"
TARGET = "TARGET"  # in a command: the target, where no name of it is known to every server
METHODS = {"argmax": "DFlash", "domino": "Domino", "dspark": "DSpark", "lilicorr": "LiLiCorr"}
LAYOUTS = {True: "anchor-first: every token of a block predicts the position behind its own", False: "in place"}
REASONING = {
    True: "on: trained on answers with reasoning; drafts of answers without it are accepted far less often",
    False: "off: trained on answers without reasoning; drafts of reasoning are accepted far less often",
    None: "as the target's chat template has it by default",
}


def model_card(description: Description, info: dict[str, Any], readers: Collection[str]) -> str:
    """The card in Markdown, with the head matter that model hubs read.

    `readers` are the formats whose readers take the folder as it stands (`format.spelled_as`).
    """
    method = METHODS.get(description.head, description.head)
    source = target_of(info).get("source")
    title = f"{method} draft model" + (f" for {source}" if source else "")
    parts = [
        _head_matter(source),
        f"# {title}",
        f"Drafts {description.spec.num_slots} tokens in one pass for speculative decoding. The target checks them, so "
        "the answers are the target's own; another target than the one below accepts next to nothing.",
        _table("property", "value", _facts(description, info)),
    ]
    training = _training(info)
    if training:
        parts += ["## Training", _table("figure", "value", training)]
    if info.get("taus"):
        parts += ["## Acceptance length", _taus(info["taus"])]
    parts += ["## Serving", _serving(description, info, readers)]
    return "\n\n".join(parts) + "\n"


def _head_matter(source: str | None) -> str:
    lines = ["library_name: lilicorr", "pipeline_tag: text-generation", "tags:", "- speculative-decoding"]
    if source and source.count("/") == 1 and not source.startswith((".", "/", "~")):  # a hub name, not a folder
        lines.insert(0, f"base_model: {source}")
    return "\n".join(["---", *lines, "---"])


def _table(name: str, value: str, rows: dict[str, Any]) -> str:
    lines = [f"| {name} | {value} |", "|---|---|"]
    return "\n".join(lines + [f"| {key} | {text} |" for key, text in rows.items() if text is not None])


def _facts(description: Description, info: dict[str, Any]) -> dict[str, Any]:
    """What the draft model is, and for which target."""
    spec, shape, target = description.spec, description.shape, target_of(info)
    kwargs = info.get("template_kwargs")
    settings = ", ".join(f"{key} {value}" for key, value in description.head_config.items())
    drafts = description.num_draft_ids
    return {
        "method": METHODS.get(description.head, description.head),
        "head": settings or None,
        "block layout": LAYOUTS[spec.layout == ANCHOR_FIRST],
        "block size": spec.block_size,
        "drafted width": f"{spec.num_slots} tokens a block",
        "candidates": spec.num_candidates if HEADS[description.head].format.candidates_field else None,
        "drafter": f"{shape.num_layers} layers, width {shape.hidden_size}, {description.dtype}",
        "vocabulary": f"{shape.vocab_size}" + ("" if drafts is None else f", of which {drafts} are drafted"),
        "target": target.get("source"),
        "revision": target.get("revision"),
        "layers captured": f"{', '.join(str(i) for i in spec.target_layer_ids)} of {shape.num_target_layers}",
        "mask token": spec.mask_token_id,
        "tokenizer, sha256": target.get("tokenizer_hash"),
        "chat template, sha256": target.get("template_hash"),
        "reasoning": None if kwargs is None else REASONING.get(kwargs.get("enable_thinking")),
        "YaRN": None
        if shape.yarn is None
        else f"{shape.yarn.factor:g} times {shape.yarn.original_max_position_embeddings}",
    }


def _training(info: dict[str, Any]) -> dict[str, Any]:
    """How it was trained; empty for a checkpoint of unknown origin."""
    corpus = info.get("corpus") or {}
    return {
        name: value
        for name, value in {
            "run": info.get("run"),
            "corpus, fingerprint": corpus.get("fingerprint"),
            "corpus": f"{corpus['rows']:,} rows, {corpus['tokens']:,} tokens"
            if None not in (corpus.get("rows"), corpus.get("tokens"))
            else None,
            "continued from": info.get("start_from"),
            "optimizer steps": info.get("steps"),
            "blocks seen": f"{info['num_blocks']:,}" if info.get("num_blocks") else None,
            "anchors a row": info.get("max_anchors"),
            "last loss": f"{info['loss']:.4f}" if info.get("loss") is not None else None,
            "acceptance length, probed while training": f"{info['tau']:.3f}" if info.get("tau") is not None else None,
            "commit": info.get("commit"),
        }.items()
        if value is not None
    }


def _taus(taus: dict[str, Any]) -> str:
    """tau of every set with its interval, in tokens per verified block, the bonus token included."""
    lines = ["| set | temperature | tau | 95 % interval | speed-up |", "|---|---|---|---|---|"]
    for name, row in taus.items():
        interval = "" if row.get("ci95") is None else "{:.2f} to {:.2f}".format(*row["ci95"])
        speed = "" if row.get("speedup") is None else f"{row['speedup']:.2f}"
        heat = "" if row.get("temperature") is None else f"{row['temperature']:g}"
        lines.append(f"| {name} | {heat} | {row['tau']:.2f} | {interval} | {speed} |")
    said = "Tokens that a verified block adds, the bonus token included; decoding is greedy at temperature 0."
    return "\n".join([said, "", *lines])


def _serving(description: Description, info: dict[str, Any], readers: Collection[str]) -> str:
    """The commands, for servers that can read this head; a server that needs another spelling gets a copy in it."""
    target, kwargs = target_of(info), json.dumps(info.get("template_kwargs") or {})
    source = target.get("source") or TARGET
    model = TARGET if source in BUILT_IN else source  # a name that other projects know
    here = f"serve run serve_app.app:build_app checkpoint=CHECKPOINT target={source} 'template_kwargs={kwargs}'"
    revision = f" --revision {target['revision']}" if target.get("revision") else ""
    if revision:
        here += f" target_revision={target['revision']}"
    if description.dtype == "bfloat16":  # of a GPU; the application takes a CPU in fp32 unless told otherwise
        here += " target_dtype=bfloat16 gpus=1"
    lines = ["CHECKPOINT stands for this folder's absolute path.", ""]
    if model == TARGET:
        lines += [f"{TARGET} stands for the target's folder or its name on a model hub{_where(source)}.", ""]
    lines += ["The library that trained it:", "", f"    {here}", ""]
    for server, name in (("vLLM", VLLM), ("SGLang", SGLANG)):
        why = problem(name, description)
        if name in readers:
            command = _command(name, model + revision, "CHECKPOINT", description)
            lines += [f"{server}, which also takes the name of this folder on a hub:", "", f"    {command}", ""]
        elif why is not None:
            lines += [f"Not {server}: {why}.", ""]
        else:
            tables = f" --target {source}{revision}" if with_tables(name, description.head) else ""
            convert = f"python -m lilicorr.checkpoint convert CHECKPOINT CONVERTED --to {name}{tables}"
            command = _command(name, model + revision, "CONVERTED", description)
            lines += [f"{server}, which reads a copy in its own spelling, CONVERTED:", ""]
            lines += [f"    {convert}", f"    {command}", ""]
    return "\n".join(lines).rstrip()


def _where(source: str) -> str:
    """Where the folder of a target is that only this library knows by its name."""
    if source not in BUILT_IN:
        return ""
    return f": `lilicorr.target.resolve_target(TargetConfig({source!r}))` returns the folder of `{source}`"


def _command(server: str, model: str, checkpoint: str, description: Description) -> str:
    """What starts a server with this draft model for the target `model`, its revision behind it."""
    settings = speculative_config(description, checkpoint)
    if server == VLLM:
        return f"vllm serve {model} --speculative-config '{json.dumps(settings)}'"
    # For a block, SGLang counts the tokens that it verifies of a DSpark draft, and those that it runs of any other.
    spec, dspark = description.spec, description.head == "dspark"
    return (
        f"python -m sglang.launch_server --model-path {model} --speculative-draft-model-path {checkpoint} "
        f"--speculative-algorithm {settings['method'].upper()} "
        f"--speculative-num-draft-tokens {spec.num_slots + 1 if dspark else spec.block_size}"
    )
