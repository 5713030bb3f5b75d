"""Anchors and labels: who may be an anchor, the seeds, and blocks at the edges of an answer."""

import torch

from lilicorr.anchors import block_labels, choose_anchors
from lilicorr.blocks import TrainBatch


def make_batch(masks: list[str], sample_ids: list[int] | None = None) -> TrainBatch:
    """Rows from strings: `.` prompt, `x` generated, `_` padding."""
    mask = torch.tensor([[c == "x" for c in row] for row in masks])
    lengths = torch.tensor([len(row.rstrip("_")) for row in masks])
    ids = torch.arange(mask.numel()).view(mask.shape)
    return TrainBatch(ids, mask, lengths, torch.tensor(sample_ids or list(range(len(masks)))))


def test_an_anchor_and_the_token_behind_it_are_generated():
    anchors, keep = choose_anchors(make_batch(["..xxxx", ".x.xx_", "...x__"]), seed=0, epoch=0, max_anchors=8)
    assert [a[k].tolist() for a, k in zip(anchors, keep)] == [[2, 3, 4], [3], []]


def test_exactly_one_candidate_is_kept():
    anchors, keep = choose_anchors(make_batch(["....xx"]), seed=0, epoch=0, max_anchors=8)
    assert anchors[keep].tolist() == [4]


def test_choice_depends_on_seed_epoch_and_sample_only():
    row = "." + "x" * 60
    alone = choose_anchors(make_batch([row], [5]), 1, 2, 8)[0][0]
    batched = choose_anchors(make_batch(["." + "x" * 50 + "_" * 10, row], [9, 5]), 1, 2, 8)[0][1]
    assert torch.equal(alone, batched)
    assert alone.tolist() == sorted(set(alone.tolist())) and len(alone) == 8
    for other in [(0, 2, 5), (1, 3, 5), (1, 2, 6)]:
        assert not torch.equal(alone, choose_anchors(make_batch([row], [other[2]]), other[0], other[1], 8)[0][0])


def test_labels_at_the_edges():
    batch = make_batch(["..xxxxx___", "..xx.xxxx_"])
    hidden = torch.randn(2, 10, 4)
    rows, anchors = torch.tensor([0, 0, 1]), torch.tensor([2, 5, 2])
    labels = block_labels(batch, rows, anchors, 3, hidden, torch.randn(20, 4))
    assert labels.token_ids[0].tolist() == [3, 4, 5]
    assert labels.valid.tolist() == [[True] * 3, [True, False, False], [True, False, True]]
    assert torch.equal(labels.target_hidden[0], hidden[0, 2:5])
    assert torch.equal(labels.target_hidden[2, 0], hidden[1, 2])


def test_target_logits_are_gathered_rows():
    batch, hidden, lm_head = make_batch([".xxxxx"]), torch.randn(1, 6, 4).double(), torch.randn(9, 4).double()
    labels = block_labels(batch, torch.tensor([0]), torch.tensor([1]), 2, hidden, lm_head)
    ids = torch.tensor([[[1, 8], [0, 3]]])
    expected = (labels.target_hidden @ lm_head.T).gather(-1, ids)
    assert torch.allclose(labels.target_logits_at(ids), expected)
