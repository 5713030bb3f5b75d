"""The training mask: its two spellings pair by pair, and the same attention by every way to compute it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, flex_attention

from lilicorr import block_mask
from lilicorr.anchors import choose_anchors
from lilicorr.block_mask import attention_under, choose_attention, dense_mask, mask_mod
from lilicorr.drafter import block_attention
from lilicorr.target import Target
from test_training import CONFIG, gradient_after, make_model, make_set, make_trainer

# A row that is filled up from its middle on, one with no block of its own, and anchors at both ends of the context.
ANCHORS = torch.tensor([[1, 4, 9, 0, 0], [0, 0, 0, 0, 0], [0, 2, 3, 8, 9]])
SIZES = [(4, 9), (3, 9), (7, 131)]  # of a block and of the context: odd ones, and more than a block of flex attention


def allowed(anchors: Tensor, size: int, length: int) -> Tensor:
    """The rule, a pair at a time: the context before the anchor, and the own block in both directions."""
    rows, num_anchors = anchors.shape
    mask = torch.zeros(rows, num_anchors * size, length + num_anchors * size, dtype=torch.bool)
    for row in range(rows):
        for query in range(num_anchors * size):
            for key in range(length + num_anchors * size):
                if key < length:
                    mask[row, query, key] = key < int(anchors[row, query // size])
                else:
                    mask[row, query, key] = (key - length) // size == query // size
    return mask


@pytest.mark.parametrize(("size", "length"), SIZES)
def test_both_spellings_of_the_mask_say_the_same_of_every_pair(size: int, length: int) -> None:
    num_queries = ANCHORS.shape[1] * size
    expected = allowed(ANCHORS, size, length)
    assert torch.equal(dense_mask(ANCHORS, size, length), expected)
    asked = create_mask(mask_mod(ANCHORS, size, length), len(ANCHORS), None, num_queries, length + num_queries, "cpu")
    assert torch.equal(asked[:, 0], expected)
    assert expected.sum(dim=2).min() == size  # a block that fills up sees itself


def draw(anchors: Tensor, size: int, length: int, dtype: torch.dtype, grad: bool = False) -> list[Tensor]:
    """Queries, keys and values of the blocks, keys and values of the context: four heads on two."""
    generator = torch.Generator().manual_seed(7)
    rows, num_anchors = anchors.shape
    shapes = [(rows, 4, num_anchors, size, 16), *[(rows, 2, num_anchors, size, 16)] * 2, *[(rows, 2, length, 16)] * 2]
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(grad) for shape in shapes]


def attend(attention: Callable[..., Tensor], tensors: list[Tensor], anchors: Tensor) -> Tensor:
    queries, block_keys, block_values, keys, values = tensors
    return attention(queries, (block_keys, block_values), (keys, values), anchors)


@pytest.fixture
def plain_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention without its kernel, which a CPU can run forwards."""
    monkeypatch.setattr(block_mask, "compiled_flex", lambda: flex_attention)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("size", "length"), SIZES)
@pytest.mark.parametrize("name", ["flex", "sdpa"])
def test_every_attention_is_the_one_in_two_parts(name: str, size: int, length: int, plain_flex: None) -> None:
    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        tensors = draw(ANCHORS, size, length, dtype)
        expected = attend(block_attention, tensors, ANCHORS)
        mixed = attend(attention_under(name, ANCHORS, size, length), tensors, ANCHORS)
        assert mixed.dtype == dtype and mixed.shape == expected.shape
        assert (mixed - expected).abs().max() < close < expected.abs().max()


def test_the_dense_mask_has_the_gradients_of_the_two_parts() -> None:
    found = []
    for attention in (block_attention, attention_under("sdpa", ANCHORS, 3, 9)):
        tensors = draw(ANCHORS, 3, 9, torch.float64, grad=True)
        attend(attention, tensors, ANCHORS).square().sum().backward()
        found.append([tensor.grad for tensor in tensors])
    for one, other in zip(*found):
        assert (one - other).abs().max() < 1e-12 < other.abs().max()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_training_pass_has_the_same_loss_by_every_attention(
    tmp_path: Path, tiny_target: Target, plain_flex: None
) -> None:
    """Rows of 9 and 30 tokens together: the shorter one is padded and its last blocks fill up."""
    model, batch = make_model(tiny_target), make_set(tmp_path).batch([0, 3])
    anchors, keep = choose_anchors(batch, 0, 0, CONFIG.max_anchors)
    output = tiny_target.forward(batch.input_ids)
    losses = {}
    with torch.no_grad():
        for name in ("parts", "flex", "sdpa"):
            terms = model(output.features, output.hidden, batch, anchors, keep, 0.5, None, name)
            losses[name] = torch.stack([term.sum for term in terms.values()])
    assert not keep.all() and losses["parts"].abs().max() > 1
    for name in ("flex", "sdpa"):
        assert (losses[name] - losses["parts"]).abs().max() < 1e-9, name


def test_the_trainer_takes_the_attention_that_its_config_names(tmp_path: Path, tiny_target: Target) -> None:
    training_set = make_set(tmp_path)
    expected = gradient_after(tiny_target, training_set, batch_size=5, micro_batch_size=2)
    names: list[str] = []
    original = block_mask.attention_under
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lilicorr.draft_model.attention_under", lambda name, *_: names.append(name) or original(name, *_))
        gradient = gradient_after(tiny_target, training_set, batch_size=5, micro_batch_size=2, attention="sdpa")
    assert names == ["sdpa"] * 3
    assert (gradient - expected).abs().max() < 1e-12 and expected.norm() > 0.1


def test_a_step_on_a_cpu_warns_of_nothing(tmp_path: Path, tiny_target: Target) -> None:
    """Flex attention called plainly would warn, and be slow and without a backward pass; `auto` does not take it."""
    trainer = make_trainer(tiny_target, make_set(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(0)
    assert trainer.attention == "parts"


def test_an_attention_is_chosen_by_name_and_by_nothing_else() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert [choose_attention("auto", device) for device in (cpu, cuda)] == ["parts", "flex"]
    assert [choose_attention(name, cuda) for name in ("flex", "sdpa", "parts")] == ["flex", "sdpa", "parts"]
    with pytest.raises(ValueError, match="train.attention must be one of auto, flex, sdpa, parts, got 'flash'"):
        choose_attention("flash", cuda)
    with pytest.raises(ValueError, match="train.attention flex has a backward pass on CUDA only, .* on cpu"):
        choose_attention("flex", cpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention has a backward pass on CUDA only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_flex_attention_has_the_values_and_gradients_of_the_two_parts(dtype: torch.dtype) -> None:
    """At two shapes, so that the kernel is used at another length than it was compiled for."""
    close = 2e-3 if dtype == torch.float32 else 5e-2
    for size, length in SIZES[1:]:
        anchors, found = ANCHORS.cuda(), []
        for attention in (block_attention, attention_under("flex", anchors, size, length)):
            tensors = [t.cuda().requires_grad_() for t in draw(ANCHORS, size, length, dtype)]
            mixed = attend(attention, tensors, anchors)
            mixed.float().square().sum().backward()
            found.append([mixed.detach(), *(tensor.grad for tensor in tensors)])
        for one, other in zip(*found):
            assert (one - other).abs().max() < close * other.abs().max()
