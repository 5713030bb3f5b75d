"""A byte-level tokenizer and a random target, small enough for tests and for the `tiny` profile.

Place in the flow: `target.resolve_target` makes the target of `source: random` with `tiny_target_folder`;
nothing is downloaded, and the same files come out every time.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lilicorr.folder import new_folder

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_ROWS = 264  # 256 bytes, three special tokens, and rows no text produces: the mask token is the first of them
MAX_LENGTH = 1024
RANDOM = {"num_layers": 2, "seed": 1}  # the target `random`: one layer can be captured; hardly an answer is empty
RECIPE = 1  # raise it with any change that makes other files
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def byte_characters() -> list[str]:
    """The 256 printable characters that stand for bytes 0..255 in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0..255 are the bytes themselves and 256..258 the special tokens, with ChatML."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def tiny_target_folder(path: Path, num_layers: int = 6, seed: int = 0) -> Path:
    """Write a random Qwen3 target of width 32 with `byte_tokenizer` to `path`, unless it is there already.

    The weights are large enough that greedy answers differ from prompt to prompt, and the end-of-turn row
    of the untied output table is scaled so that some answers stop by themselves. Returns `path`.
    """
    recipe = {"recipe": RECIPE, "num_layers": num_layers, "seed": seed}
    mark = path / "recipe.json"
    if mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == recipe:
        return path
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(_config(num_layers, tokenizer.eos_token_id, tokenizer.pad_token_id))
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 1.5
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with new_folder(path) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / mark.name).write_text(json.dumps(recipe) + "\n", encoding="utf-8")
    return path


def _config(num_layers: int, eos_token_id: int, pad_token_id: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=NUM_ROWS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
