"""The embedded target: a small published folder that loads as Qwen3 and answers heads with Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

import lilicorr
from lilicorr import stdlib, tiny
from pipelines import pretrain

FOLDER = Path(lilicorr.__file__).parent / "embedded"
FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "provenance.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
MAX_BYTES = 12 * 2**20
MASK_TOKEN_ID = 4090
USER = {"role": "user", "content": 'def f(x):\n    """Return x."""'}
ANSWER = {"role": "assistant", "content": "    y = x\n    return y"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_folder() -> None:
    assert {path.name for path in FOLDER.iterdir()} == FILES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_BYTES


def test_provenance() -> None:
    provenance = json.loads((FOLDER / "provenance.json").read_text())
    assert provenance["command"].split()[1] == "pipelines/pretrain.py"
    assert isinstance(provenance["config"]["seed"], int)
    assert len(provenance["corpus"]["sha256"]) == 64
    assert provenance["steps"] > 0 and provenance["tokens"] > 0
    assert 0.0 < provenance["held_out_loss"] < 4.0
    assert provenance["greedy_completions"]["samples"]


def test_architecture(model: Qwen3ForCausalLM) -> None:
    assert type(model) is Qwen3ForCausalLM
    config = AutoConfig.from_pretrained(FOLDER)
    assert config.dtype == torch.bfloat16
    assert config.hidden_size <= 192 and config.num_hidden_layers >= 6
    assert config.tie_word_embeddings and config.vocab_size == 4096
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (2, 0, None)


def test_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == MASK_TOKEN_ID  # the mask token is the first row the tokenizer never makes
    assert tokenizer.convert_tokens_to_ids(list(tiny.SPECIAL_TOKENS)) == [0, 1, 2]
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.bos_token is None
    text = "def f(x):\n    if x:\n        return 'näive ∑ \U0001f600'\n\n\n\tpass  \r\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    for width in (4, 8, 12, 16):
        assert len(tokenizer(f"\n{' ' * width}x")["input_ids"]) == 3  # newline, indentation, x


def test_chat_template_is_plain_chatml(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE is pretrain.CHAT_TEMPLATE
    assert pretrain.SPECIAL_TOKENS is tiny.SPECIAL_TOKENS
    text = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert text == f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    for thinking in (True, False):
        assert text == tokenizer.apply_chat_template(
            [USER], tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
    system = {"role": "system", "content": "Be brief."}
    assert tokenizer.apply_chat_template([system, USER, ANSWER], tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n{ANSWER['content']}<|im_end|>\n"
    )


def test_generation_prompt_is_a_prefix_of_the_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([USER, ANSWER], return_dict=False)
    assert whole[: len(prompt)] == prompt


@pytest.mark.parametrize("special", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
def test_special_token_text_is_not_a_special_token(tokenizer: PreTrainedTokenizerFast, special: str) -> None:
    ids = tokenizer(f"x{special}y", split_special_tokens=True)["input_ids"]
    assert min(ids) > 2
    assert tokenizer.decode(ids) == f"x{special}y"


def test_greedy_answers(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """On 24 held-out heads: half the answers are Python or more, three quarters start without a loop."""
    held_out = stdlib.prompts(stdlib.stdlib_root(), held_out=True)
    chosen = held_out[:: len(held_out) // 24][:24]
    answers = [stdlib.complete(model, tokenizer, function, max_new_tokens=96) for function in chosen]
    assert len(answers) == 24
    assert sum(answer.parsed for answer in answers) >= 12
    loops = [stdlib.find_loop(answer.token_ids[:64]) for answer in answers]
    assert sum(loop is None for loop in loops) >= 18
    assert sum(answer.ended for answer in answers) >= 8
