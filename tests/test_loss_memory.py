"""What a training step holds: no whole vocabulary logits, no whole attention scores, and exact all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lilicorr import draft_model as draft_model_module
from lilicorr import drafter
from lilicorr.blocks import TrainBatch
from lilicorr.budget import PeakMemory
from lilicorr.config import DrafterConfig
from lilicorr.draft_model import DraftModel, blocks_at_once, build_draft_model
from lilicorr.drafter import block_attention, block_spec, chunked_attention, drafter_shape
from lilicorr.heads import HEADS
from lilicorr.losses import total_loss
from lilicorr.target import Target
from random_target import make_target
from test_heads import SMALL

CONFIG = DrafterConfig(num_layers=1, block_size=6, num_candidates=4)
CHUNK = 100_000  # bytes of fp32 logits


def make_model(head: str, vocab: int) -> tuple[DraftModel, Target]:
    target = make_target(vocab=vocab, num_layers=3, num_captured=1)
    torch.manual_seed(3)
    spec = block_spec(CONFIG, target.config, target.mask_token_id, HEADS[head].layouts[0])
    shape = drafter_shape(CONFIG, target.config)
    return build_draft_model(shape, spec, head, SMALL[head], target).double(), target


def loss_of(
    model: DraftModel, num_blocks: int, monkeypatch: pytest.MonkeyPatch, chunk_blocks: int | None
) -> tuple[PeakMemory, Tensor, float]:
    """Memory of the loss behind the drafter, forward and backward; the drafter's gradient; the loss."""
    torch.manual_seed(5)
    length, hidden_size = num_blocks + 8, model.shape.hidden_size
    ids = torch.randint(0, model.embed.shape[0] - 3, (1, length))
    mask = torch.ones(1, length, dtype=torch.bool)
    batch = TrainBatch(ids, mask, torch.tensor([length]), torch.zeros(1, dtype=torch.long))
    anchors = torch.arange(1, num_blocks + 1)[None]
    hidden = torch.randn(1, num_blocks, model.spec.num_slots, hidden_size, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(model.drafter, "forward", lambda *_: hidden)
    features, final = torch.randn(2, 1, length, hidden_size, dtype=torch.float64)
    with PeakMemory() as memory:
        terms = model(features, final, batch, anchors, torch.ones_like(anchors, dtype=torch.bool), 1.0, chunk_blocks)
        loss = total_loss(terms)
        loss.backward()
    return memory, hidden.grad, float(loss.detach())


@pytest.mark.parametrize("head", ["argmax", "lilicorr", "domino", "dspark"])
def test_the_memory_of_the_loss_depends_on_neither_vocabulary_nor_blocks(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Domino's base loss has no weight any more at the end of training; its graph must not stay."""
    monkeypatch.setattr(draft_model_module, "CHUNK_BYTES", CHUNK)
    models, blocks = [make_model(head, vocab)[0] for vocab in (400, 1600)], (16, 64)
    peaks = [[loss_of(model, number, monkeypatch, None)[0] for number in blocks] for model in models]
    dense = [loss_of(model, number, monkeypatch, 10_000)[0] for model, number in zip(models, blocks)]
    logits = 8 * 5 * 64 * 1600  # [N, S, V] in fp64; chunks hold 2 * CHUNK of it at most
    assert dense[1].peak > 3 * logits and dense[1].largest >= logits and dense[1].peak > 5 * dense[0].peak
    for of_model in peaks:
        assert of_model[1].peak < 1.6 * of_model[0].peak  # four times the blocks
        assert max(memory.largest for memory in of_model) <= 2 * CHUNK
    for small, large in zip(*peaks):
        assert large.peak < 1.2 * small.peak  # four times the vocabulary


@pytest.mark.parametrize("head", ["argmax", "lilicorr", "domino", "dspark"])
def test_chunks_by_bytes_have_the_dense_loss_and_gradient(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model_module, "CHUNK_BYTES", 4 * 6 * 67 * 3)
    gradients, losses = [], []
    for chunk_blocks in (None, 10_000):
        model, _ = make_model(head, 67)
        assert blocks_at_once(model.spec.num_slots, 67) == 3
        _, gradient, loss = loss_of(model, 40, monkeypatch, chunk_blocks)
        own = [p.grad.flatten() for p in model.head.parameters() if p.grad is not None]
        gradients.append(torch.cat([gradient.flatten(), *own]))
        losses.append(loss)
    assert losses[0] == pytest.approx(losses[1], abs=1e-11) and gradients[1].norm() > 1e-3
    assert (gradients[0] - gradients[1]).abs().max() < 1e-9


def attend(num_anchors: int, length: int) -> tuple[PeakMemory, list[Tensor]]:
    """Memory of attention forward and backward, its result and all gradients."""
    draw = torch.Generator().manual_seed(7)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw).requires_grad_()

    queries, context = leaf(2, 4, num_anchors, 6, 8), (leaf(2, 2, length, 8), leaf(2, 2, length, 8))
    block = (leaf(2, 2, num_anchors, 6, 8), leaf(2, 2, num_anchors, 6, 8))
    anchors = torch.randint(0, length, (2, num_anchors), generator=draw)
    with PeakMemory() as memory:
        mixed = chunked_attention(queries, block, context, anchors)
        mixed.square().sum().backward()
    return memory, [mixed.detach(), *(tensor.grad for tensor in (queries, *block, *context))]


def test_chunked_attention_is_the_whole_one_in_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_memory, whole = attend(48, 200)
    scores = 8 * 2 * 4 * 48 * 6 * 206
    assert whole_memory.largest >= scores
    monkeypatch.setattr(drafter, "SCORE_BYTES", scores // 2 // 7)  # scores are counted in fp32
    memory, parts = attend(48, 200)
    for one, other in zip(parts, whole):
        assert (one - other).abs().max() < 1e-12 and other.abs().max() > 0.1
    assert memory.largest < scores / 6 and memory.peak < whole_memory.peak / 3
    with torch.no_grad():
        args = [torch.randn(2, h, 9, 6, 8) for h in (4, 2, 2)] + [torch.randn(2, 2, 30, 8) for _ in range(2)]
        arguments = (args[0], (args[1], args[2]), (args[3], args[4]), torch.arange(18).view(2, 9))
        monkeypatch.setattr(drafter, "SCORE_BYTES", 1)  # an anchor at a time
        assert (chunked_attention(*arguments) - block_attention(*arguments)).abs().max() < 1e-5
