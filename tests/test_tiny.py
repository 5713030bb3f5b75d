"""The tiny tokenizer is the bytes, and the tiny target is the same every time and has something to say."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from lilicorr.config import TargetConfig
from lilicorr.generator import TransformersGenerator
from lilicorr.provenance import sha256_tree
from lilicorr.target import load_target
from lilicorr.tiny import NUM_ROWS, SPECIAL_TOKENS, byte_tokenizer, tiny_target_folder


def test_ids_are_bytes_and_specials_follow() -> None:
    tokenizer = byte_tokenizer()
    text = "a\tß 👋🏽\r\n\x00\x7f" + bytes(range(32, 127)).decode()
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [256, 257, 258]
    assert len(tokenizer) == 259 < NUM_ROWS
    assert tokenizer.eos_token_id == 258 and tokenizer.pad_token_id == 256


def test_the_target_is_deterministic_and_made_once(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    first = tiny_target_folder(tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert sha256_tree(first) == sha256_tree(tiny_target_folder(tmp_path / "b"))
    assert sha256_tree(first) != sha256_tree(tiny_target_folder(tmp_path / "c", seed=1))
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    tiny_target_folder(first)
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert tiny_target_folder(first, num_layers=2) == first
    assert (first / "model.safetensors").stat().st_mtime_ns != stamp
    assert AutoTokenizer.from_pretrained(first).chat_template == byte_tokenizer().chat_template


def test_greedy_answers_vary_and_some_stop(tmp_path: Path) -> None:
    target = load_target(TargetConfig(source=str(tiny_target_folder(tmp_path / "target"))))
    assert target.eos_ids == (258,) and target.mask_token_id == 259
    generator = TransformersGenerator(target, batch_size=32)
    for key in range(32):
        generator.submit(key, [257, *f"user\nquestion {key}".encode(), 258], 48)
    answers = [completion for _, completion in generator.poll()]
    assert len({tuple(answer.token_ids) for answer in answers}) > 24
    stopped = sum(answer.finish_reason == "stop" for answer in answers)
    assert 4 <= stopped <= 28
