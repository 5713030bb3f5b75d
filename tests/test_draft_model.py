"""The draft model: one pass over all anchors against cached decoding, and chunked against whole losses."""

from dataclasses import replace

import pytest
import torch

from lilicorr.anchors import choose_anchors
from lilicorr.blocks import ANCHOR_FIRST, IN_PLACE, TrainBatch
from lilicorr.config import DrafterConfig
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.drafter import block_spec, drafter_shape
from lilicorr.heads import HEADS
from lilicorr.losses import total_loss
from lilicorr.target import Target
from test_heads import SMALL

CONFIG = DrafterConfig(num_layers=2, block_size=6, num_candidates=4)


def make_model(target: Target, head: str = "lilicorr", vocab_ids: torch.Tensor | None = None) -> DraftModel:
    torch.manual_seed(3)
    shape = drafter_shape(CONFIG, target.config)
    spec = block_spec(CONFIG, target.config, target.mask_token_id, HEADS[head].layouts[0])
    model = build_draft_model(shape, spec, head, SMALL[head], target, vocab_ids).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def make_batch() -> TrainBatch:
    torch.manual_seed(4)
    ids = torch.randint(0, 60, (3, 24))
    lengths = torch.tensor([24, 19, 9])
    mask = torch.arange(24) < lengths[:, None]
    mask[:, :5] = False
    return TrainBatch(ids, mask, lengths, torch.arange(3))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize(("head", "layout"), [("lilicorr", IN_PLACE), ("domino", ANCHOR_FIRST)])
def test_one_pass_over_anchors_equals_cached_decoding(target_factory, family, head, layout):
    target = target_factory(family)
    model, batch = make_model(target, head), make_batch()
    assert model.spec.layout == layout
    output = target.forward(batch.input_ids)
    anchors, _ = choose_anchors(batch, 0, 0, 100)
    context, hidden = model.block_states(output.features, batch, anchors)
    assert hidden.shape == (*anchors.shape, model.spec.num_slots, model.shape.hidden_size)
    for row in range(3):
        cache, length = model.new_context(32), 0
        for column, anchor in enumerate(anchors[row].tolist()):
            if anchor == 0:
                break
            if anchor > length:
                model.extend_context(cache, output.features[row : row + 1, length:anchor])
                length = anchor
            draft = model.draft(batch.input_ids[row, anchor : anchor + 1], cache)
            assert (draft.hidden[0] - hidden[row, column]).abs().max() < 1e-10
            assert (draft.anchor_context[0] - context[row, anchor - 1]).abs().max() < 1e-10


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("chunk_blocks", [1, 4, 7])
def test_chunked_losses_and_gradients_equal_whole_ones(tiny_target, head, chunk_blocks):
    model, batch = make_model(tiny_target, head), make_batch()
    output = tiny_target.forward(batch.input_ids)
    anchors, keep = choose_anchors(batch, 0, 0, 100)
    results = []
    for size in (10_000, chunk_blocks):
        model.zero_grad()
        terms = model(output.features, output.hidden, batch, anchors, keep, 0.5, size)
        total_loss(terms).backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((terms, gradients))
    (whole, first), (chunked, second) = results
    for name in whole:
        assert float(whole[name].sum.detach()) == pytest.approx(float(chunked[name].sum.detach()), abs=1e-9)
        assert float(whole[name].count) == pytest.approx(float(chunked[name].count), rel=1e-12)
    assert (first - second).abs().max() < 1e-9


@pytest.mark.parametrize("head", HEADS)
def test_the_targets_tables_get_no_gradient(tiny_target, head):
    """Neither the candidates' embeddings nor the masks', nor the output table behind logits and labels."""
    batch, plain = make_batch(), make_model(tiny_target, head)
    tables = [table.clone().requires_grad_() for table in (tiny_target.embed, tiny_target.lm_head)]
    model = DraftModel(plain.shape, plain.spec, head, SMALL[head], *tables).double()
    model.load_state_dict(plain.state_dict())
    output = tiny_target.forward(batch.input_ids)
    anchors, keep = choose_anchors(batch, 0, 0, 100)
    total_loss(model(output.features, output.hidden, batch, anchors, keep, 1.0, 100)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert [table.grad for table in tables] == [None, None]


def test_padding_blocks_count_nothing(tiny_target):
    model, batch = make_model(tiny_target), make_batch()
    output = tiny_target.forward(batch.input_ids)
    anchors, keep = choose_anchors(batch, 0, 0, 100)
    assert not keep.all()
    wider = torch.cat([anchors, torch.zeros(3, 2, dtype=torch.long)], dim=1)
    padded = torch.cat([keep, torch.zeros(3, 2, dtype=torch.bool)], dim=1)
    first = model(output.features, output.hidden, batch, anchors, keep, 1.0, 100)
    second = model(output.features, output.hidden, batch, wider, padded, 1.0, 100)
    assert float(total_loss(first).detach()) == pytest.approx(float(total_loss(second).detach()), abs=1e-12)


def test_a_batch_without_blocks_has_a_differentiable_zero_loss(tiny_target):
    model, batch = make_model(tiny_target), make_batch()
    empty = TrainBatch(batch.input_ids, torch.zeros_like(batch.loss_mask), batch.lengths, batch.sample_ids)
    output = tiny_target.forward(empty.input_ids)
    anchors, keep = choose_anchors(empty, 0, 0, 100)
    loss = total_loss(model(output.features, output.hidden, empty, anchors, keep, 1.0, 100))
    loss.backward()
    assert float(loss.detach()) == 0.0


def test_a_complete_draft_vocabulary_changes_nothing(tiny_target):
    batch = make_batch()
    output = tiny_target.forward(batch.input_ids)
    anchors, keep = choose_anchors(batch, 0, 0, 100)
    losses = []
    for vocab_ids in (None, torch.arange(67)):
        model = make_model(tiny_target, vocab_ids=vocab_ids)
        losses.append(float(total_loss(model(output.features, output.hidden, batch, anchors, keep, 1.0, 100)).detach()))
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_a_restricted_draft_vocabulary_proposes_only_its_own(tiny_target):
    batch = make_batch()
    vocab_ids = torch.unique(batch.input_ids[batch.loss_mask])[::2].contiguous()
    model = make_model(tiny_target, vocab_ids=vocab_ids)
    output = tiny_target.forward(batch.input_ids)
    cache = model.new_context(32)
    model.extend_context(cache, output.features[:1, :8])
    proposal = model.head.propose(model.draft(batch.input_ids[0, 8:9], cache))
    assert torch.isin(proposal.token_ids, vocab_ids).all()
    anchors, keep = choose_anchors(batch, 0, 0, 100)
    restricted = model(output.features, output.hidden, batch, anchors, keep, 1.0, 100)["drafter_ce"]
    whole = make_model(tiny_target)(output.features, output.hidden, batch, anchors, keep, 1.0, 100)["drafter_ce"]
    assert 0 < float(restricted.count) < float(whole.count)


def test_unknown_heads_and_masks_are_refused(tiny_target):
    shape, spec = drafter_shape(CONFIG, tiny_target.config), block_spec(CONFIG, tiny_target.config, 66)
    with pytest.raises(ValueError, match="head must be one of argmax, domino, dspark, lilicorr"):
        build_draft_model(shape, spec, "medusa", {}, tiny_target)
    with pytest.raises(ValueError, match="unknown key sigma; did you mean"):
        build_draft_model(shape, spec, "lilicorr", {"sigma": 8.0}, tiny_target)
    outside = block_spec(CONFIG, tiny_target.config, 151669)
    with pytest.raises(ValueError, match="mask token id 151669 is outside the target's 67 embedding rows"):
        build_draft_model(shape, outside, "argmax", {}, tiny_target)
    many = replace(spec, num_candidates=68)
    with pytest.raises(ValueError, match="num_candidates must be at most 67, all there are, got 68"):
        build_draft_model(shape, many, "lilicorr", {}, tiny_target)
    few = torch.arange(spec.num_candidates - 1)
    with pytest.raises(ValueError, match=f"num_candidates must be at most {len(few)}, all there are, got"):
        build_draft_model(shape, spec, "lilicorr", {}, tiny_target, few)
