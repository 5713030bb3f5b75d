"""The LiLiCorr head classes of SGLang and vLLM score our exported tensors as we do, and their walks are ours."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peers import Case, toy_case, trained_case
from safetensors.torch import load_file
from stand_in import load_head, peer, splat_booleans

from lilicorr.blocks import DraftOutput
from lilicorr.checkpoint import write_checkpoint
from lilicorr.draft_model import DraftModel
from lilicorr.lattice import Lattice, candidates
from lilicorr.target import Target

pytestmark = pytest.mark.slow
CASES = {
    "random": lambda: toy_case("lilicorr", num_candidates=4),
    "tiny profile": lambda: trained_case("tiny", "lilicorr"),
    "demo profile": lambda: trained_case("demo", "lilicorr"),
}


@torch.no_grad()
def drafted(case: Case) -> tuple[DraftModel, DraftOutput, Lattice]:
    """A block behind each of the prompts."""
    target, model, _, prompts = case
    drafts = []
    for prompt in prompts:
        context = model.new_context(len(prompt) + model.spec.block_size)
        ids = torch.tensor([prompt])
        model.extend_context(context, features_before_the_last(target, ids))
        drafts.append(model.draft(ids[:, -1], context))
    fields = ("anchor_ids", "hidden", "logits", "anchor_context", "anchor_valid")
    joined = (torch.cat([getattr(draft, name) for draft in drafts]) for name in fields)
    draft = DraftOutput(*joined, model.embed, model.vocab_ids, model.num_ids)
    return model, draft, candidates(draft, model.spec.num_candidates)


def features_before_the_last(target: Target, ids: torch.Tensor) -> torch.Tensor:
    return target.forward(ids[:, :-1]).features


def assert_same(
    model: DraftModel,
    draft: DraftOutput,
    lattice: Lattice,
    start: torch.Tensor,
    pair: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Scores within 1e-5, and the same tokens of the greedy walk [N, S]; prints how far apart the scores are."""
    with torch.no_grad():
        ours = model.head.scores(draft, lattice)
        walk = model.head.propose(draft).token_ids
    apart = max((start - ours[0]).abs().max().item(), (pair - ours[1]).abs().max().item())
    off_top = (walk != lattice.token_ids[..., 0]).sum().item()
    print(f"\n{len(walk)} blocks: scores within {apart:.1e}; {off_top} of {walk.numel()} tokens not on top")
    torch.testing.assert_close(start, ours[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(pair, ours[1], rtol=0, atol=1e-5)
    assert torch.equal(tokens, walk)


@pytest.mark.parametrize("case", CASES)
def test_sglang(case: str, tmp_path: Path) -> None:
    given = CASES[case]()
    model, draft, lattice = drafted(given)
    write_checkpoint(tmp_path / "export", given[2], "sglang")
    fields = json.loads((tmp_path / "export" / "config.json").read_text())
    modules = (
        *("sglang.kernels.ops.speculative.lilicorr", "sglang.srt.speculative.lilicorr_utils"),
        "sglang.srt.models.lilicorr",
    )
    with peer("sglang", *modules) as (_, utils, models), torch.no_grad():
        config = utils._parse_lilicorr_config(fields["dflash_config"])
        sizes = {"model_hidden_size": fields["hidden_size"], "block_size": fields["block_size"]}
        head = models.LiLiCorrHead(**sizes, rms_norm_eps=fields["rms_norm_eps"], config=config)
        tensors = load_file(tmp_path / "export" / "model.safetensors")
        models.check_head_weight_coverage(head, {name for name in tensors if name.startswith("lilicorr.")})
        load_head(head, tensors)
        views = {
            "candidate_log_probs": lattice.log_probs,
            "token_embeddings": draft.embed[lattice.token_ids],
            "pass_hidden": draft.hidden,
            "anchor_hidden": draft.anchor_context,
            "anchor_valid": draft.anchor_valid,
        }
        scores = head.score(**{name: value[:, None] for name, value in views.items()})
        start, pair = head.log_factors(*scores)
        rows, slots = lattice.token_ids.shape[:2]
        greedy = {"uniforms": torch.zeros(rows, slots), "temperatures": torch.ones(rows)}
        greedy["greedy_mask"] = torch.ones(rows, dtype=torch.bool)
        tokens, _ = head.select_with_proposal(**views, candidate_tokens=lattice.token_ids, **greedy)
    assert_same(model, draft, lattice, start[:, 0], pair[:, 0], tokens)


@pytest.mark.parametrize("case", CASES)
def test_vllm(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splat_booleans(monkeypatch)
    given = CASES[case]()
    model, draft, lattice = drafted(given)
    write_checkpoint(tmp_path / "export", given[2], "vllm")
    fields = json.loads((tmp_path / "export" / "config.json").read_text())
    worker = "vllm.v1.worker.gpu"
    walk = (f"{worker}.sample.gumbel", f"{worker}.spec_decode.dflash2.speculator")
    with peer("vllm", "vllm.model_executor.models.lilicorr", *walk) as (models, _, speculator), torch.no_grad():
        sizes = {"model_hidden_size": fields["hidden_size"], "block_size": fields["block_size"]}
        head = models.LiLiCorrHead(**sizes, rms_norm_eps=fields["rms_norm_eps"], config=fields["dflash_config"])
        load_head(head, load_file(tmp_path / "export" / "model.safetensors"))
        scores = head(
            token_embeddings=draft.embed[lattice.token_ids],
            candidate_log_probs=lattice.log_probs,
            pass_hidden=draft.hidden,
            anchor_hidden=draft.anchor_context,
            anchor_valid=draft.anchor_valid,
        )
        rows, slots, num_candidates = lattice.token_ids.shape
        tokens = torch.full((rows, slots), -1)
        speculator.CandidateSampler(rows, slots, num_candidates, torch.device("cpu")).sample(
            candidate_ids=lattice.token_ids,
            scores=scores,
            num_reqs=rows,
            sample_pos=torch.arange(1, slots + 1).repeat(rows),
            idx_mapping=torch.arange(rows).repeat_interleave(slots),
            temperature=torch.zeros(rows),
            seeds=torch.zeros(rows, dtype=torch.int64),
            draft_tokens=tokens,
            draft_logits=None,
            use_fp64=False,
        )
    assert_same(model, draft, lattice, scores[:, 0, 0], scores[:, 1:], tokens)


def test_the_numbered_names_of_before_are_not_what_they_read(tmp_path: Path) -> None:
    """Why names are written: with numbers the coverage check of SGLang's own loader fails."""
    _, model, checkpoint, _ = toy_case("lilicorr", num_candidates=4)
    write_checkpoint(tmp_path / "numbered", checkpoint, "modelopt")
    tensors = load_file(tmp_path / "numbered" / "model.safetensors")
    modules = ("sglang.srt.speculative.lilicorr_utils", "sglang.srt.models.lilicorr")
    with peer("sglang", *modules) as (_, models):
        config = SimpleNamespace(
            **{name: getattr(model.head.config, name) for name in model.head.format.config_fields.values()},
            candidate_topk=model.spec.num_candidates,
            resolve_hidden_size=lambda model_hidden_size: model.head.config.hidden_size or model_hidden_size,
        )
        sizes = {"model_hidden_size": model.shape.hidden_size, "block_size": model.spec.block_size}
        head = models.LiLiCorrHead(**sizes, rms_norm_eps=1e-6, config=config)
        with pytest.raises(ValueError, match="missing .* head parameters"):
            models.check_head_weight_coverage(head, {name for name in tensors if name.startswith("lilicorr.")})
