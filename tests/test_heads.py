"""What is particular to the argmax and LiLiCorr heads; what holds of every head is in test_head_contract.py."""

import itertools
from dataclasses import replace

import pytest
import torch

from lilicorr.blocks import IN_PLACE, BlockLabels, BlockSpec, DraftOutput
from lilicorr.config import LiLiCorrConfig, from_dict
from lilicorr.heads import HEADS
from lilicorr.heads.lilicorr import LiLiCorrHead
from lilicorr.lattice import WALKS, candidates, log_probs_at
from lilicorr.losses import acceptance_weights, total_loss
from lilicorr.verify import Sampling
from test_drafter import make_shape

SMALL = {
    "argmax": {},
    "domino": dict(gru_hidden_dim=12, emb_dim=8),
    "dspark": dict(markov_rank=8),
    "lilicorr": dict(hidden_size=16, num_heads=2, factor_dim=12, full_blocks_only=False),
}
SPEC = BlockSpec(block_size=6, num_candidates=4, mask_token_id=66, target_layer_ids=(1, 3))


def make_head(name: str, seed: int = 0, **changes) -> torch.nn.Module:
    """A head with every parameter random, tables and biases included."""
    torch.manual_seed(seed)
    layout = HEADS[name].layouts[0]
    spec = replace(SPEC, layout=layout, block_size=6 if layout == IN_PLACE else 5)
    head = HEADS[name](from_dict(HEADS[name].Config, SMALL[name] | changes), make_shape(), spec).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def make_blocks(n: int = 7, seed: int = 1, covered: bool = True) -> tuple[DraftOutput, BlockLabels]:
    torch.manual_seed(seed)
    embed, lm_head = (torch.randn(67, 32, dtype=torch.float64) for _ in range(2))
    hidden = torch.randn(n, 5, 32, dtype=torch.float64)
    draft = DraftOutput(
        anchor_ids=torch.randint(0, 67, (n,)),
        hidden=hidden,
        logits=hidden @ lm_head.T,
        anchor_context=torch.randn(n, 32, dtype=torch.float64),
        anchor_valid=torch.ones(n, dtype=torch.bool),
        embed=embed,
    )
    labels = draft.logits.topk(3, dim=-1).indices[..., 2] if covered else draft.logits.argmin(dim=-1)
    valid = torch.ones(n, 5, dtype=torch.bool)
    return draft, BlockLabels(labels.contiguous(), valid, torch.randn(n, 5, 32, dtype=torch.float64), lm_head)


def test_argmax_head_is_the_argmax():
    draft, _ = make_blocks()
    assert torch.equal(make_head("argmax").propose(draft).token_ids, draft.logits.argmax(-1))


def test_a_padding_row_of_the_table_makes_no_head_surer():
    draft, _ = make_blocks()
    head = make_head("argmax")
    draft.logits[..., 60:] = 50.0
    draft = replace(draft, num_ids=60)
    found = head.step_confidence(draft, head.propose(draft))
    assert torch.allclose(found, draft.logits[..., :60].softmax(-1).amax(-1))


def test_scores_are_cosines_times_sigma():
    head, (draft, _) = make_head("lilicorr", logit_scale=8.0), make_blocks()
    anchor, pairs = head.scores(draft, candidates(draft, 4))
    assert anchor.shape == (7, 4) and pairs.shape == (7, 4, 4, 4)
    largest = max(anchor.abs().max().item(), pairs.abs().max().item())
    assert 1.0 < largest <= 8.0
    half = make_head("lilicorr", logit_scale=4.0)
    assert torch.allclose(half.scores(draft, candidates(draft, 4))[1] * 2, pairs)


def test_scores_depend_on_the_whole_lattice_but_the_walk_is_pairwise():
    """Section 3.2: a pair's score may rest on evidence outside the pair."""
    head, (draft, _) = make_head("lilicorr"), make_blocks(n=1)
    before = head.scores(draft, candidates(draft, 4))[1]
    hidden = draft.hidden.clone()
    hidden[0, 4] += 1.0
    moved = DraftOutput(draft.anchor_ids, hidden, draft.logits, draft.anchor_context, draft.anchor_valid, draft.embed)
    after = head.scores(moved, candidates(moved, 4))[1]
    assert (before[0, 0] - after[0, 0]).abs().max() > 1e-6
    # the walk sees of a slot's scores the row of what it committed before: others may be anything
    draft, _ = make_blocks()
    lattice = candidates(draft, 4)
    anchor, pairs = head.scores(draft, lattice)
    walked = lattice.token_ids == head.propose(draft).token_ids[..., None]
    assert (walked.sum(-1) == 1).all()
    ranks = walked.int().argmax(-1)
    assert torch.equal(ranks[:, 0], anchor.argmax(-1))
    others = torch.where(walked[:, :-1, :, None], pairs, 100 * torch.randn_like(pairs))
    for slot in range(1, 5):
        assert torch.equal(ranks[:, slot], pairs[range(7), slot - 1, ranks[:, slot - 1]].argmax(-1))
    assert torch.equal(WALKS["greedy"](anchor, others), ranks)
    assert not torch.equal(WALKS["exact"](anchor, others), ranks)


def test_a_block_without_a_position_before_its_anchor_has_no_context():
    head, (draft, _) = make_head("lilicorr"), make_blocks(n=2)
    valid = torch.tensor([False, True])
    first = DraftOutput(draft.anchor_ids, draft.hidden, draft.logits, draft.anchor_context, valid, draft.embed)
    second = DraftOutput(draft.anchor_ids, draft.hidden, draft.logits, draft.anchor_context * 9, valid, draft.embed)
    lattice = candidates(draft, 4)
    same, other = (head.scores(d, lattice)[0] for d in (first, second))
    assert torch.equal(same[0], other[0]) and not torch.allclose(same[1], other[1])


def test_published_initialisation():
    torch.manual_seed(0)
    head = LiLiCorrHead(LiLiCorrConfig(hidden_size=64, factor_dim=64), make_shape(), SPEC)
    for table in (head.slot_embedding, head.rank_embedding, head.relative_slot_bias, head.same_slot_bias):
        assert not table.any()
    for linear in (head.out_head, head.in_head, head.anchor_out_head):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1) and not linear.bias.any()
    assert head.layers[0].attn.in_proj_weight.std().item() > 0.05


def test_an_uncovered_first_slot_leaves_the_head_without_signal():
    head, (draft, labels) = make_head("lilicorr"), make_blocks(covered=False)
    terms = head.loss(draft, labels, 1.0)
    assert float(terms["head_ce"].count) == float(terms["distractor"].count) == 0.0
    assert float(terms["oracle_prefix"].sum) == 0.0
    assert float(terms["drafter_ce"].count) > 0.0


def test_a_miss_in_the_middle_ends_the_supervision():
    head, (draft, labels) = make_head("lilicorr"), make_blocks(n=1)
    ids = labels.token_ids.clone()
    ids[0, 2] = draft.logits[0, 2].argmin()
    terms = head.loss(draft, BlockLabels(ids, labels.valid, labels.target_hidden, labels.lm_head), 1.0)
    assert float(terms["head_ce"].count) == 2.0


def test_full_blocks_only_drops_blocks_at_the_end_of_an_answer():
    draft, labels = make_blocks(n=2)
    valid = labels.valid.clone()
    valid[1, 4] = False
    labels = BlockLabels(labels.token_ids, valid, labels.target_hidden, labels.lm_head)
    heads = [make_head("lilicorr", full_blocks_only=full) for full in (True, False)]
    counts = [float(head.loss(draft, labels, 1.0)["head_ce"].count) for head in heads]
    assert counts == [5.0, 9.0]


def test_margin_and_ramp_keep_the_total_weight():
    draft, labels = make_blocks()
    plain = make_head("lilicorr").loss(draft, labels, 1.0)
    margin = make_head("lilicorr", margin_blend=0.5).loss(draft, labels, 1.0)
    ramped = make_head("lilicorr", ramp_fraction=0.5).loss(draft, labels, 0.25)
    assert [plain[n].weight for n in ("head_ce", "distractor", "margin")] == [0.25, 0.25, 0.0]
    assert [margin[n].weight for n in ("head_ce", "distractor", "margin")] == [0.125, 0.25, 0.125]
    assert [ramped[n].weight for n in ("head_ce", "distractor", "margin")] == [0.125, 0.125, 0.0]


def test_the_exact_walk_is_a_setting_of_the_same_parameters():
    draft, _ = make_blocks(n=64)
    heads = [make_head("lilicorr", walk=walk) for walk in WALKS]
    for head in heads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(heads[0].parameters(), head.parameters()))
    proposed = [head.propose(draft).token_ids for head in heads]
    for one, other in itertools.combinations(proposed, 2):
        assert (one != other).any()
    with pytest.raises(ValueError, match="walk must be one of greedy, exact, lookahead, got 'viterbi'"):
        make_head("lilicorr", walk="viterbi")
    with pytest.raises(ValueError, match="contract must be one of deterministic, sampled, got 'random'"):
        make_head("lilicorr", contract="random")
    with pytest.raises(ValueError, match="sampled contract draws along the greedy walk, got walk 'exact'"):
        make_head("lilicorr", contract="sampled", walk="exact")


def test_the_sampled_walk_says_which_law_it_drew_from():
    """Section 4.7 of the public servers: K-sparse, the softmax of the scores along the walked path at the row's T."""
    draft, _ = make_blocks(n=40)
    head = make_head("lilicorr", contract="sampled")
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0]).repeat(10).double()
    sampling = Sampling(temperature, *(torch.full((40,), v) for v in (0, 1.0, 3, 8)))
    proposal, lattice = head.propose(draft, sampling), candidates(draft, 4)
    anchor, pairs = head.scores(draft, lattice)
    assert torch.equal(proposal.support_ids, lattice.token_ids) and proposal.probs.shape == (40, 5, 4)
    ranks = (lattice.token_ids == proposal.token_ids[..., None]).int().argmax(-1)
    for block in range(40):
        scores = torch.cat([anchor[block, None], pairs[block, range(4), ranks[block, :-1]]])
        warm = float(temperature[block])
        expected = (scores / warm).softmax(-1) if warm else torch.nn.functional.one_hot(scores.argmax(-1), 4).double()
        assert torch.allclose(proposal.probs[block], expected)
    greedy = make_head("lilicorr").propose(draft).token_ids
    assert torch.equal(proposal.token_ids[::4], greedy[::4]) and (proposal.token_ids != greedy).any()
    assert head.propose(draft).probs is None and torch.equal(head.propose(draft).token_ids, greedy)


def test_dpace_weights_replace_the_decay_in_the_drafters_loss():
    draft, labels = make_blocks()
    for name in ("argmax", "lilicorr"):
        plain, weighted = (make_head(name, **c).loss(draft, labels, 1.0) for c in ({}, {"dpace_alpha": 0.5}))
        assert plain["drafter_ce"].count != weighted["drafter_ce"].count
        changed = {n for n in plain if float(plain[n].sum.detach()) != float(weighted[n].sum.detach())}
        assert changed == {"drafter_ce"}
    log_probs = log_probs_at(draft.logits, labels.token_ids[..., None])[..., 0]
    expected = acceptance_weights(log_probs, labels.valid, 0.5)
    assert float(weighted["drafter_ce"].sum) == pytest.approx(-float((expected * log_probs).sum()))


def test_smallest_shapes():
    """One candidate, one slot, and a head as wide as the drafter."""
    for spec in (BlockSpec(2, 4, 66, (1, 3)), BlockSpec(6, 1, 66, (1, 3))):
        torch.manual_seed(0)
        config = LiLiCorrConfig(hidden_size=0, num_heads=4, factor_dim=8, full_blocks_only=False)
        head = LiLiCorrHead(config, make_shape(), spec).double()
        draft, labels = make_blocks()
        cut = spec.num_slots
        draft = DraftOutput(
            draft.anchor_ids,
            draft.hidden[:, :cut],
            draft.logits[:, :cut],
            draft.anchor_context,
            draft.anchor_valid,
            draft.embed,
        )
        labels = BlockLabels(
            labels.token_ids[:, :cut], labels.valid[:, :cut], labels.target_hidden[:, :cut], labels.lm_head
        )
        assert head.propose(draft).token_ids.shape == (7, cut)
        assert torch.isfinite(total_loss(head.loss(draft, labels, 1.0)))
        assert "token_proj.weight" not in head.state_dict()


def test_a_head_as_wide_as_the_drafter_has_no_token_projection():
    for hidden_size in (0, 32):
        head = LiLiCorrHead(LiLiCorrConfig(hidden_size=hidden_size, num_heads=4), make_shape(), SPEC)
        assert not any(name.startswith("token_proj") for name in head.state_dict())


def test_norms_take_the_epsilon_of_the_target():
    head = LiLiCorrHead(LiLiCorrConfig(hidden_size=16, num_heads=2), replace(make_shape(), rms_norm_eps=1e-5), SPEC)
    assert {m.eps for m in head.modules() if isinstance(m, torch.nn.RMSNorm)} == {1e-5}


def test_a_narrower_target_table_is_widened():
    head, (draft, _) = make_head("lilicorr"), make_blocks()
    half = replace(draft, embed=draft.embed.bfloat16())
    exact = replace(draft, embed=draft.embed.bfloat16().double())
    assert torch.equal(head.propose(half).token_ids, head.propose(exact).token_ids)
    single = replace(half, hidden=draft.hidden[:1], logits=draft.logits[:1], anchor_context=draft.anchor_context[:1])
    single = replace(single, anchor_ids=draft.anchor_ids[:1], anchor_valid=draft.anchor_valid[:1])
    assert torch.equal(head.propose(single).token_ids, head.propose(exact).token_ids[:1])


@pytest.mark.parametrize(("hidden", "parameters"), [(4096, 36_758_794), (2560, 32_040_202)])
def test_parameter_counts_of_the_paper(hidden, parameters):
    spec = BlockSpec(16, 8, 151669, (1, 9, 17, 25, 33))
    with torch.device("meta"):
        head = LiLiCorrHead(LiLiCorrConfig(), make_shape(hidden_size=hidden), spec)
    assert sum(p.numel() for p in head.parameters()) == parameters


def test_the_token_projection_starts_at_the_scale_of_the_table():
    """The projected table has the wanted root mean square, whatever the table's own; without a wish nothing changes."""
    torch.manual_seed(0)
    embed = 0.01 * torch.randn(67, 32, dtype=torch.float64)
    for scale in (0.0, 1.5):
        head = HEADS["lilicorr"](
            from_dict(LiLiCorrConfig, SMALL["lilicorr"] | {"token_scale": scale}), make_shape(), SPEC
        )
        head = head.double()
        before = head.token_proj.weight.clone()
        head.fit_table(embed)
        rms = float((embed @ head.token_proj.weight.detach().T).square().mean().sqrt())
        assert rms == pytest.approx(scale) if scale else torch.equal(head.token_proj.weight, before)
    wide = SMALL["lilicorr"] | {"hidden_size": 32, "token_scale": 1.0}
    with pytest.raises(ValueError, match="token_scale must not be negative, .* width 32, .* got 1.0"):
        HEADS["lilicorr"](from_dict(LiLiCorrConfig, wide), make_shape(), SPEC)
