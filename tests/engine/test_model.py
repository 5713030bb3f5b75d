"""The paged forward passes against transformers and against the drafter's own."""

from __future__ import annotations

import pytest
import torch
from toys import random_prompts, toy_draft_model, toy_engine, toy_target
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lilicorr.decode import Decoder, SamplingParams
from lilicorr.engine.model import PagedDrafter, PagedTarget, Places, num_pages_in, page_slots
from lilicorr.target import Target

SHAPE = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e3,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama, tied, scaled": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=LLAMA3)
    ),
}


def make_places(page_table: torch.Tensor, starts: list[int], size: int, counts: list[int]) -> Places:
    """`size` positions of each row, of which `counts` are no padding."""
    first, count = torch.tensor(starts), torch.tensor(counts)
    positions = first[:, None] + torch.arange(size)
    slots = page_slots(page_table, positions, torch.arange(size) < count[:, None])
    return Places(positions, slots, page_table, first + count, count)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_features_are_those_of_transformers(name: str) -> None:
    torch.manual_seed(3)
    model = MODELS[name]()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            torch.nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.3)
    target = Target(model, None, layer_ids=(0, 2), mask_token_id=96)
    lengths = [150, 70]
    token_ids = [torch.randint(97, (1, length)) for length in lengths]
    expected = [target.forward(ids) for ids in token_ids]
    logits = [target.logits(output.hidden) for output in expected]

    paged = PagedTarget(target, num_pages=7, num_positions=192)
    page_table = torch.tensor([[5, 0, 3], [2, 6, 0]], dtype=torch.int32)
    done = [0, 0]
    for size in (64, 30, 1, 55):  # chunks that cross pages, and padding where a row is at its end
        counts = [min(size, length - start) for length, start in zip(lengths, done)]
        chunk = torch.zeros(2, size, dtype=torch.int64)
        for row, (start, count) in enumerate(zip(done, counts)):
            chunk[row, :count] = token_ids[row][0, start : start + count]
        output = paged.forward(chunk, make_places(page_table, done, size, counts))
        for row, (start, count) in enumerate(zip(done, counts)):
            got = paged.logits(output.hidden[row, :count])
            torch.testing.assert_close(got, logits[row][0, start : start + count], rtol=0, atol=1e-4)
            wanted = expected[row].features[0, start : start + count]
            torch.testing.assert_close(output.features[row, :count], wanted, rtol=1e-4, atol=1e-4)
        done = [start + count for start, count in zip(done, counts)]
    assert done == lengths
    # pages 1 and 4 belong to nobody
    assert all(float(layer.k_pages[page].abs().max()) == 0 for layer in paged.layers for page in (1, 4))


def test_the_paged_drafter_drafts_what_the_drafter_drafts() -> None:
    target = toy_target(vocab=67)
    draft_model = toy_draft_model(target, "argmax", block_size=6)
    prompts = [[3, 1, 2], random_prompts(1, vocab=60)[0][:90]]
    features = [target.forward(torch.tensor([prompt])).features for prompt in prompts]
    drafts = []
    for row, prompt in enumerate(prompts):
        context = draft_model.new_context(200)
        draft_model.extend_context(context, features[row])
        drafts.append(draft_model.draft(torch.tensor([prompt[0] + row]), context))

    paged = PagedDrafter(draft_model, target, num_pages=5, num_positions=128)
    page_table = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32)
    last = []
    with torch.no_grad():
        for row, of_one in enumerate(features):
            count = of_one.shape[1]
            context = paged.append(of_one, make_places(page_table[row : row + 1], [0], count, [count]))
            last.append(context[0, -1])
        places = make_places(page_table, [len(prompt) for prompt in prompts], 6, [6, 6])
        anchors = torch.tensor([prompt[0] + row for row, prompt in enumerate(prompts)])
        got = paged.draft(anchors, torch.stack(last), places)
    for row, wanted in enumerate(drafts):
        torch.testing.assert_close(got.logits[row : row + 1], wanted.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.hidden[row : row + 1], wanted.hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.anchor_context[row : row + 1], wanted.anchor_context, rtol=1e-4, atol=1e-4)


def test_nothing_is_written_where_the_slot_is_negative() -> None:
    target = toy_target()
    paged = PagedTarget(target, num_pages=2, num_positions=128)
    places = make_places(torch.tensor([[1, 0]], dtype=torch.int32), [62], 4, [4])
    paged.forward(torch.zeros(1, 4, dtype=torch.int64), Places(places.positions, places.slots * 0 - 1, *rest(places)))
    assert all(float(layer.k_pages.abs().max()) == float(layer.v_pages.abs().max()) == 0 for layer in paged.layers)
    paged.forward(torch.zeros(1, 4, dtype=torch.int64), places)
    for layer in paged.layers:
        written = layer.k_pages.abs().amax(dim=(1, 3)) > 0
        assert written.nonzero().tolist() == [[0, 0], [0, 1], [1, 62], [1, 63]]


def rest(places: Places) -> tuple:
    return places.page_table, places.kv_lengths, places.query_lengths


def test_fused_weights_exist_once() -> None:
    target = toy_target(vocab=67)
    before = target.logits(target.forward(torch.tensor([[1, 2, 3]])).hidden)
    first, second = toy_engine(target, None), toy_engine(target, None)
    layers = [engine._step.target.layers[0] for engine in (first, second)]
    attention = target.model.base_model.layers[0].self_attn
    assert layers[0].qkv.data_ptr() == layers[1].qkv.data_ptr() == attention.q_proj.weight.data_ptr()
    assert torch.equal(
        layers[1].qkv, torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
    )
    assert torch.equal(target.logits(target.forward(torch.tensor([[1, 2, 3]])).hidden), before)


def test_a_draft_models_weights_exist_once() -> None:
    target = toy_target(vocab=67)
    draft_model = toy_draft_model(target, "argmax")
    first, second = toy_engine(target, draft_model), toy_engine(target, draft_model)
    drafters = [engine._step.drafter for engine in (first, second)]
    projection = draft_model.drafter.layers[0].self_attn.q_proj.weight
    assert {d.layers[0].qkv.data_ptr() for d in drafters} == {projection.data_ptr()}
    assert drafters[0].context_weights.data_ptr() == drafters[1].context_weights.data_ptr()
    with torch.no_grad():
        projection.mul_(-1)  # both see what becomes of the module
    prompt, params = [3, 1, 4], SamplingParams(20)
    expected = Decoder(target, draft_model).generate(prompt, params)
    for engine in (first, second):
        decoded = engine.generate([prompt], params)[0]
        assert (decoded.token_ids, decoded.num_blocks) == (expected.token_ids, expected.num_blocks)


def test_targets_the_layers_do_not_know_are_refused() -> None:
    target = toy_target()
    for name, value, message in (
        ("model_type", "gemma3", "model_type llama or qwen2 or qwen3, got 'gemma3'"),
        ("hidden_act", "gelu", "hidden_act silu, got 'gelu'"),
        ("rope_parameters", {"rope_type": "dynamic"}, "rope_type .*, got 'dynamic'"),
        ("layer_types", ["full_attention", "sliding_attention"], "full attention in all layers"),
    ):
        kept = getattr(target.config, name)
        setattr(target.config, name, value)
        with pytest.raises(ValueError, match=message):
            toy_engine(target, None)
        setattr(target.config, name, kept)
    with pytest.raises(ValueError, match=r"reads target layers \(1,\), the target captures \(0,\)"):
        draft_model = toy_draft_model(target, "argmax")
        target.layer_ids = (0,)
        PagedDrafter(draft_model, target, 1, 1)


def test_the_number_of_pages_follows_from_the_memory() -> None:
    target = toy_target()
    page = 64 * 2 * 2 * 2 * 8 * 4  # positions, layers, keys and values, heads, width, bytes
    assert num_pages_in(10 * page / 2**30, target, None) == 10
    assert num_pages_in(15 * page / 2**30, target, toy_draft_model(target, "argmax")) == 10
    with pytest.raises(ValueError, match=f"must hold a page of {page} bytes, got 1e-06"):
        num_pages_in(1e-6, target, None)
