"""The seven systems of the paper's tables, added to any profile at equal budget.

Place in the flow: `pipelines/full.py --systems all` changes the profile's config before anything runs. Every run
takes steps, schedule and start of the profile's own `dflash` run and differs in head and layout only, so all systems
see the same rows and anchors; every drafted width is that of the profile's in-place drafter. Runs that the profile has
already are not trained again.

    python pipelines/full.py --profile demo --systems all --until evaluate
    python pipelines/full.py --profile smollm2 --systems dflash,domino,lilicorr --until evaluate

Paper: section 4.1 (baselines), Table 5, Appendices E (walks) and G (margin).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lilicorr.config import LiLiCorrConfig, PipelineConfig, RunConfig, SystemConfig, from_dict

SYSTEMS = ("autoregressive", "dflash", "domino", "dspark", "dspark_sampled", "lilicorr", "lilicorr_margin")
WALKS = ("exact", "lookahead")  # besides the greedy walk, on every LiLiCorr checkpoint
WITHOUT_YARN = "_no_yarn"  # of every system, where the profile has evaluate.yarn
SEEDS = (42, 43, 44)  # of the paper's runs at temperature 1
MARGIN = {"margin_blend": 0.5, "margin": 2.0}  # mu and rho of Appendix G
PUBLISHED_WIDTH = 1024  # of the LiLiCorr head and of Domino's recurrent cell; a smaller profile scales both
BOTTLENECK = 256  # of Domino, and DSpark's rank, at that width


def chosen(names: str) -> tuple[str, ...]:
    """`all`, or names with commas between; raises ValueError for one that is unknown."""
    asked = SYSTEMS if names == "all" else tuple(name.strip() for name in names.split(","))
    for name in asked:
        if name not in SYSTEMS:
            raise ValueError(f"systems must be all or some of {', '.join(SYSTEMS)}, got {name!r}")
    return asked


def with_systems(config: PipelineConfig, names: Sequence[str]) -> PipelineConfig:
    """The profile with the runs of these systems, and evaluated greedily and at temperature 1 over three seeds.

    Where it extends its drafters (`evaluate.yarn`), every system is decoded greedily without the extension too.

    Raises ValueError if the profile lacks the runs `dflash` and `lilicorr`, which the others are derived from.
    """
    runs, systems = dict(config.train.runs), {"autoregressive": SystemConfig()}
    for name in ("dflash", "lilicorr"):
        if name not in runs:
            raise ValueError(f"systems need the runs dflash and lilicorr; the runs are {', '.join(runs)}")
    for name in names:
        run = "dspark" if name == "dspark_sampled" else name
        if run in ("domino", "dspark") and run not in runs:
            runs |= _anchor_first(config, run)
        if run == "lilicorr_margin" and run not in runs:
            runs[run] = replace(runs["lilicorr"], head_config=runs["lilicorr"].head_config | MARGIN)
        if name == "dspark_sampled":  # at temperature 0 both contracts draft the same
            systems[name] = SystemConfig(run, head_config={"contract": "sampled"}, only="sampled")
        elif name != "autoregressive":
            systems[name] = SystemConfig(run)
        if name.startswith("lilicorr"):
            for walk in WALKS:
                systems[f"{name}_{walk}"] = SystemConfig(run, head_config={"walk": walk}, only="greedy")
        if config.evaluate.yarn is not None and name not in ("autoregressive", "dspark_sampled"):
            systems[f"{name}{WITHOUT_YARN}"] = SystemConfig(run, yarn=False, only="greedy")
    evaluate = replace(
        config.evaluate, systems=systems | config.evaluate.systems, sampled_seeds=config.evaluate.sampled_seeds or SEEDS
    )
    return replace(config, train=replace(config.train, runs=runs), evaluate=evaluate)


def _anchor_first(config: PipelineConfig, head: str) -> dict[str, RunConfig]:
    """The run of an anchor-first head, behind the trunk in its layout that it starts from, where there is one."""
    base, width = config.train.runs["dflash"], config.train.drafter.block_size - 1
    ours = from_dict(LiLiCorrConfig, config.train.runs["lilicorr"].head_config)
    decay = base.head_config.get("decay", ours.decay)
    scale = (ours.hidden_size or PUBLISHED_WIDTH) / PUBLISHED_WIDTH
    bottleneck = max(1, round(BOTTLENECK * scale))
    sizes = {
        "domino": {"gru_hidden_dim": max(1, round(PUBLISHED_WIDTH * scale)), "emb_dim": bottleneck},
        "dspark": {"markov_rank": bottleneck},
    }
    run = replace(base, head=head, head_config={"decay": decay} | sizes[head], block_size=width, block_layout=None)
    if base.start_from is None:
        return {head: run}
    if base.start_from not in config.train.runs:
        raise ValueError(
            f"train.runs.dflash starts from {base.start_from}, whose blocks are cut in place: give the run {head} a "
            "start of its own in the profile"
        )
    trunk = f"{base.start_from}_anchor_first"
    start = replace(config.train.runs[base.start_from], block_layout="anchor_first", block_size=width)
    return {trunk: start, head: replace(run, start_from=trunk)}
