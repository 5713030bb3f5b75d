"""The drafter: what a block may see, training against cached decoding, and the published sizes."""

import pytest
import torch

from lilicorr.blocks import BlockSpec
from lilicorr.config import DrafterConfig, YarnConfig
from lilicorr.drafter import (
    Drafter,
    DrafterShape,
    RMSNorm,
    Rotary,
    block_attention,
    block_spec,
    captured_layer_ids,
    copy_target_layers,
    drafter_shape,
)


def make_shape(**changes: int) -> DrafterShape:
    values = dict(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        num_captured_layers=2,
        vocab_size=67,
        num_target_layers=6,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=512,
    )
    return DrafterShape(**(values | changes))


@pytest.fixture
def drafter() -> Drafter:
    torch.manual_seed(0)
    drafter = Drafter(make_shape()).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_has_the_bits_of_the_engines(dtype: torch.dtype):
    torch.manual_seed(0)
    norm, x = RMSNorm(64, 1e-5).to(dtype), (3 * torch.randn(50, 64)).to(dtype)
    torch.nn.init.normal_(norm.weight)
    found = norm(x)
    assert torch.equal(found, torch.nn.functional.rms_norm(x, (64,), norm.weight, norm.eps))
    full = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + norm.eps)
    exact = full * norm.weight.double()
    assert torch.allclose(found.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5)  # rounded once
    assert norm.float()(x).dtype == torch.float32  # as under autocast


def run(drafter: Drafter, features: torch.Tensor, embeds: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    return drafter(embeds, anchors, drafter.context_kv(drafter.fuse(features)))


def test_a_block_sees_the_context_before_its_anchor_only(drafter):
    features = torch.randn(1, 12, 64, dtype=torch.float64)
    embeds = torch.randn(1, 2, 5, 32, dtype=torch.float64)
    anchors = torch.tensor([[4, 7]])
    before = run(drafter, features, embeds, anchors)
    for position in range(12):
        changed = features.clone()
        changed[0, position] += 1.0
        moved = (run(drafter, changed, embeds, anchors) - before).abs().amax(dim=(0, 2, 3)) > 1e-9
        assert moved.tolist() == [position < 4, position < 7], f"position {position}"


def test_blocks_do_not_see_each_other_and_see_all_of_themselves(drafter):
    features = torch.randn(1, 12, 64, dtype=torch.float64)
    embeds = torch.randn(1, 2, 5, 32, dtype=torch.float64)
    anchors = torch.tensor([[4, 6]])
    before = run(drafter, features, embeds, anchors)
    for slot in range(5):
        changed = embeds.clone()
        changed[0, 1, slot] += 1.0
        moved = (run(drafter, features, changed, anchors) - before).abs().amax(dim=(0, 3)) > 1e-9
        assert not moved[0].any() and moved[1].all(), f"slot {slot}"


def test_attention_against_a_dense_mask():
    torch.manual_seed(0)
    rows, heads, kv, a, b, d, t = 2, 4, 2, 3, 4, 8, 9
    queries = torch.randn(rows, heads, a, b, d, dtype=torch.float64)
    block_kv = tuple(torch.randn(rows, kv, a, b, d, dtype=torch.float64) for _ in range(2))
    context_kv = tuple(torch.randn(rows, kv, t, d, dtype=torch.float64) for _ in range(2))
    anchors = torch.tensor([[0, 3, 9], [1, 2, 5]])
    blocks = torch.arange(a * b) // b
    allowed = torch.cat(
        [
            (torch.arange(t) < anchors[..., None]).repeat_interleave(b, dim=1),
            (blocks[:, None] == blocks).expand(rows, -1, -1),
        ],
        dim=-1,
    )
    keys, values = (
        torch.cat([c, x.flatten(2, 3)], dim=2).repeat_interleave(heads // kv, dim=1)
        for c, x in zip(context_kv, block_kv)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.flatten(2, 3), keys, values, attn_mask=allowed[:, None]
    )
    got = block_attention(queries, block_kv, context_kv, anchors)
    assert torch.allclose(got.flatten(2, 3), expected, atol=1e-12)


def test_shape_comes_from_the_target(tiny_target):
    shape = drafter_shape(DrafterConfig(num_layers=2), tiny_target.config)
    assert shape == make_shape(intermediate_size=64)
    assert block_spec(DrafterConfig(num_layers=2), tiny_target.config, 66) == BlockSpec(16, 8, 66, (1, 3))


@pytest.mark.parametrize(
    ("hidden", "intermediate", "parameters"), [(4096, 12288, 1_048_626_432), (2560, 9728, 537_427_200)]
)
def test_parameter_counts_of_the_published_drafters(hidden, intermediate, parameters):
    shape = make_shape(
        hidden_size=hidden,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        num_captured_layers=5,
    )
    with torch.device("meta"):
        drafter = Drafter(shape)
    assert sum(p.numel() for p in drafter.parameters()) == parameters
    assert len(drafter.state_dict()) == 58


def test_block_spec_refuses_nonsense():
    for arguments, message in [
        ((1, 8, 0, (1,)), "block_size must be at least 2"),
        ((8, 0, 0, (1,)), "num_candidates must be at least 1"),
        ((8, 8, -1, (1,)), "mask_token_id must not be negative"),
        ((8, 8, 0, (3, 1)), "target_layer_ids must be ascending"),
        ((8, 8, 0, ()), "target_layer_ids must be ascending"),
    ]:
        with pytest.raises(ValueError, match=message):
            BlockSpec(*arguments)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_copied_layers_see_in_the_context_what_they_saw_in_the_target(target_factory, family):
    """Layers 4 and 5 of six are copied; layer 3's output, captured last, is what layer 4 reads (norms in fp32)."""
    target = target_factory(family)
    for layer in target.layers:
        torch.nn.init.uniform_(layer.input_layernorm.weight, 0.5, 2.0)
    drafter = Drafter(drafter_shape(DrafterConfig(num_layers=2), target.config)).double()
    copy_target_layers(drafter, target)
    ids = torch.arange(12)[None]
    cache = target.new_cache(12)
    features = target.forward(ids, cache).features
    keys, values = drafter.context_kv(drafter.fuse(features))[0]
    torch.testing.assert_close(values, cache.layers[4].values[:, :, :12], rtol=0, atol=1e-5)
    if family == "qwen3":  # Llama's keys have no norm, the drafter's do
        torch.testing.assert_close(keys, cache.layers[4].keys[:, :, :12], rtol=0, atol=1e-5)
    x = torch.randn(3, 32, dtype=torch.float64)
    copied, source = drafter.layers[1], target.layers[5]
    expected = source.mlp(source.post_attention_layernorm(x))
    torch.testing.assert_close(copied.mlp(copied.post_attention_layernorm(x)), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(drafter.norm.weight, target.final_norm.weight)


def test_layers_of_another_shape_are_not_copied(target_factory):
    target = target_factory()
    shape = drafter_shape(DrafterConfig(num_layers=2, intermediate_size=24), target.config)
    with pytest.raises(ValueError, match=r"mlp.gate_proj.weight of the drafter is \[24, 32\], the target has \[64"):
        copy_target_layers(Drafter(shape).double(), target)
    target.layers[5].self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(32, dtype=torch.float64))
    drafter = Drafter(drafter_shape(DrafterConfig(num_layers=2), target.config)).double()
    with pytest.raises(ValueError, match="no place for the target's self_attn.q_proj.bias"):
        copy_target_layers(drafter, target)


def test_anchor_first_keeps_the_anchors_own_state(drafter):
    torch.manual_seed(1)
    features = torch.randn(1, 12, 64, dtype=torch.float64)
    embeds, anchors = torch.randn(1, 2, 5, 32, dtype=torch.float64), torch.tensor([[4, 7]])
    in_place = run(drafter, features, embeds, anchors)
    first = Drafter(make_shape(), "anchor_first").double()
    first.load_state_dict(drafter.state_dict())
    whole = run(first, features, embeds, anchors)
    assert in_place.shape[2] == 4 and whole.shape[2] == 5
    assert torch.equal(whole[:, :, 1:], in_place)


@pytest.mark.parametrize(("factor", "length", "attention"), [(4.0, 128, None), (13.33, 3072, None), (2.0, 64, 1.0)])
def test_yarn_is_the_one_of_transformers(factor, length, attention):
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(rope_type="yarn", rope_theta=1e6, factor=factor, original_max_position_embeddings=length)
    if attention is not None:
        parameters["attention_factor"] = attention
    config = Qwen3Config(head_dim=128, max_position_embeddings=int(factor * length), rope_parameters=parameters)
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    rotary = Rotary(128, 1e6, YarnConfig(factor, length, attention_factor=attention))
    assert torch.allclose(rotary.frequencies(torch.device("cpu"), torch.float32), expected)
    assert rotary.scale == pytest.approx(scale)
    x, positions = torch.randn(3, 5, 128, dtype=torch.float64), torch.arange(5)
    plain = Rotary(128, 1e6)(x, positions)
    assert not torch.allclose(rotary(x, positions), plain)
    assert torch.allclose(rotary(x, positions).norm(dim=-1), rotary.scale * x.norm(dim=-1))


def test_the_published_yarn_figures():
    """Training length 3,072 stretched to 40,960: 13 of 64 frequencies stay, 35 are divided by the factor."""
    rotary = Rotary(128, 1e6, YarnConfig(40_960 / 3072, 3072))
    ratio = rotary.frequencies(torch.device("cpu"), torch.float64) / Rotary(128, 1e6).frequencies(
        torch.device("cpu"), torch.float64
    )
    assert int((ratio == 1).sum()) == 13 and int(torch.isclose(ratio, ratio.new_tensor(3072 / 40_960)).sum()) == 35
    assert rotary.scale == pytest.approx(1.2590, abs=1e-4)


def test_the_captured_layers_are_those_that_are_set():
    assert captured_layer_ids(DrafterConfig(num_layers=2), 6) == (1, 3)
    with pytest.raises(ValueError, match="2 distinct layers cannot be captured from 2"):  # not of a field nobody set
        captured_layer_ids(DrafterConfig(num_layers=2), 2)
    with pytest.raises(ValueError, match="must read at least 1 layer of the target, got 0"):
        captured_layer_ids(DrafterConfig(num_captured_layers=0), 6)
    assert captured_layer_ids(DrafterConfig(num_layers=2, target_layer_ids=(0, 2, 5)), 6) == (0, 2, 5)
    for config, message in (
        (DrafterConfig(target_layer_ids=(2, 6)), r"target_layer_ids \[2, 6\] are past the target's 6 layers"),
        (DrafterConfig(target_layer_ids=(2, 1)), "target_layer_ids must be ascending"),
        (DrafterConfig(target_layer_ids=(1, 2), num_captured_layers=3), r"is 3, target_layer_ids are 2: \[1, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            captured_layer_ids(config, 6)
