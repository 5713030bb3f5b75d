"""The target: captured layers, cache rollback, mask token and loading faults."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from lilicorr.config import TargetConfig
from lilicorr.target import (
    Target,
    default_layer_ids,
    load_target,
    resolve_mask_token,
    resolve_target,
    target_head_dim,
)
from lilicorr.tiny import byte_tokenizer, tiny_target_folder


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_captured_layers_are_the_residual_stream(target_factory, family):
    target = target_factory(family)
    ids = torch.randint(0, 60, (2, 9))
    output = target.forward(ids)
    states = target.model(ids, output_hidden_states=True)
    width = target.config.hidden_size
    for i, layer_id in enumerate(target.layer_ids):
        captured = output.features[..., i * width : (i + 1) * width]
        assert torch.equal(captured, states.hidden_states[layer_id + 1])
        assert not torch.equal(captured, states.hidden_states[layer_id])
    assert torch.allclose(target.logits(output.hidden), states.logits, atol=1e-12)


def test_the_last_layer_is_captured_before_the_final_norm(tiny_target):
    last = tiny_target.config.num_hidden_layers - 1
    target = Target(tiny_target.model, None, (last,), 66)
    output = target.forward(torch.randint(0, 60, (1, 5)))
    normalised = target.model.model.norm(output.features)
    assert torch.allclose(target.logits(normalised), target.logits(output.hidden))
    assert not torch.allclose(output.features, output.hidden)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_rollback_is_setting_a_length(target_factory, family):
    target = target_factory(family)
    ids = torch.randint(0, 60, (1, 16))
    whole = target.forward(ids)
    cache = target.new_cache(20)
    target.forward(ids[:, :7], cache)
    target.forward(torch.full((1, 5), 3), cache)
    assert cache.length == 12
    cache.length = 7
    rest = target.forward(ids[:, 7:], cache)
    assert torch.allclose(rest.hidden, whole.hidden[:, 7:], atol=1e-12)
    assert torch.allclose(rest.features, whole.features[:, 7:], atol=1e-12)
    with pytest.raises(AssertionError, match="cache of 20 positions asked to hold 21"):
        target.forward(torch.zeros(1, 5, dtype=torch.long), cache)


def test_right_padding_changes_nothing(tiny_target):
    ids = torch.randint(0, 60, (1, 8))
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    assert torch.allclose(tiny_target.forward(padded).hidden[:, :8], tiny_target.forward(ids).hidden, atol=1e-12)


def test_default_layer_ids_are_those_of_the_published_drafters():
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_layer_ids(28, 1) == (14,)
    assert default_layer_ids(8, 3) == (1, 3, 5)
    with pytest.raises(ValueError, match="3 distinct layers cannot be captured from 5"):
        default_layer_ids(5, 3)
    for num_captured in (0, -1):
        with pytest.raises(ValueError, match=f"at least 1 layer of the target, got {num_captured}"):
            default_layer_ids(5, num_captured)


def tokenizer_of(num_tokens: int, hole: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i}": i for i in range(num_tokens - len(special)) if f"w{i}" != hole}
    vocabulary |= {token: num_tokens - 1 - i for i, token in enumerate(special.values())}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w0")), **special)


def test_mask_token_is_the_first_row_the_tokenizer_never_produces():
    assert resolve_mask_token(TargetConfig(), tokenizer_of(60), 64) == 60
    assert resolve_mask_token(TargetConfig(mask_token_id=7), tokenizer_of(60), 64) == 7
    assert resolve_mask_token(TargetConfig(), tokenizer_of(60, mask_token="<m>"), 60) == 59
    holey = tokenizer_of(60, hole="w7")
    assert (len(holey), resolve_mask_token(TargetConfig(), holey, 64)) == (59, 60)
    with pytest.raises(ValueError, match="all taken"):
        resolve_mask_token(TargetConfig(), tokenizer_of(60), 60)
    with pytest.raises(ValueError, match="mask_token_id 151669 is outside the target's 64 embedding rows"):
        resolve_mask_token(TargetConfig(mask_token_id=151669), tokenizer_of(60), 64)


def test_weights_on_a_cpu_are_memory_and_not_the_file(tmp_path):
    """A change of the file under a running process changes no answer."""
    folder = tiny_target_folder(tmp_path / "target")
    target = load_target(TargetConfig(str(folder)))
    before = target.embed.clone()
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 2)
        file.write(bytes(weights.stat().st_size // 2))
    assert torch.equal(target.embed, before)
    assert str(weights) not in Path("/proc/self/maps").read_text()


def test_wrong_targets_are_refused(tiny_target, tmp_path):
    with pytest.raises(ValueError, match="captured layer 6 of a target with 6 layers"):
        Target(tiny_target.model, None, (1, 6), 66)
    with pytest.raises(ValueError, match="mask token id 67 is outside the target's 67 embedding rows"):
        Target(tiny_target.model, None, (1,), 67)
    with pytest.raises(ValueError, match="has no config.json"):
        resolve_target(TargetConfig(source=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="target.dtype must be one of"):
        load_target(TargetConfig(dtype="int3"))


def test_tokens_are_told_from_padding_rows_by_the_tokenizer(target_factory):
    target = target_factory(vocab=264)
    assert target.num_ids is None
    target.tokenizer = byte_tokenizer()
    assert target.num_ids == len(target.tokenizer) == 259
    target.tokenizer.add_tokens([f"<extra {i}>" for i in range(9)])
    assert target.num_ids == 264


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: setattr(m.config, "final_logit_softcapping", 30.0),
            "final_logit_softcapping = 30.0 is not supported",
        ),
        (lambda m: setattr(m.config, "logit_scale", 0.06), "logit_scale = 0.06 is not supported"),
        (lambda m: setattr(m.config, "logits_scaling", 8.0), "logits_scaling = 8.0 is not supported"),
        (lambda m: setattr(m.lm_head, "bias", torch.nn.Parameter(torch.zeros(67))), "lm_head with a bias"),
        (lambda m: delattr(m.model, "norm"), "a target of the kind qwen3 is not supported: it has no norm"),
    ],
)
def test_a_target_whose_logits_are_something_else_is_refused(tiny_target, change, message):
    change(tiny_target.model)
    with pytest.raises(ValueError, match=message):
        Target(tiny_target.model, None, (1,), 66)


def test_the_width_of_an_attention_head_is_stated_or_follows_from_the_others():
    sizes = dict(hidden_size=32, num_attention_heads=4)
    configs = [SimpleNamespace(**sizes, **more) for more in ({}, {"head_dim": None}, {"head_dim": 16})]
    assert [target_head_dim(config) for config in configs] == [8, 8, 16]
