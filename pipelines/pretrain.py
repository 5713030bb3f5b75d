r"""Train the embedded target of the `demo` profile on the source of Python's standard library.

First stage of the demo, run once by the project: its output is the package data in
`lilicorr/embedded`, a Qwen3-architecture chat model that answers the head of a function with its body.
It needs no download and no accelerator. From the repository's root:

    python pipelines/pretrain.py --output build/phase1 --steps 2700 --stop-after 866 --compile
    python pipelines/pretrain.py --output build/phase2 --start build/phase1 --steps 450 --seed 1 \
        --matrix-lr 0.0028 --other-lr 0.0021 --compile
    python pipelines/pretrain.py --output lilicorr/embedded --start build/phase2 --steps 1400 --seed 2 \
        --matrix-lr 0.0028 --other-lr 0.0021 --compile

The published target was made by these three phases (some 35 minutes on two cores); one run with a longer
schedule does as well.
The stages are those of `run`: documents (held-out modules excluded everywhere), byte-level BPE
tokenizer, packed rows with a block-diagonal causal mask, Muon for the matrices and AdamW for the rest,
statistics on held-out prompts, and a transformers folder with `provenance.json` beside the weights.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import logging
import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lilicorr import stdlib
from lilicorr.provenance import provenance, write_json
from lilicorr.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS

logger = logging.getLogger(__name__)

NUM_TOKENS = 4090  # of the tokenizer; the drafter's mask token is the first row after them
NUM_ROWS = 4096  # of the embedding
MAX_NEW_TOKENS = 256  # of the answers that the statistics are made of
# Newlines, then a line's indentation as one piece, words with the sign or blank before them, numbers,
# runs of signs. Newline and indentation stay apart so that the generation prompt, which ends in a
# newline, encodes to a prefix of the whole conversation.
PIECES = r"\n+|(?<=\n)[ \t]+|[^\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|\s"

Piece = tuple[str, list[int]]  # a document's kind, token ids
Row = list[list[int]]  # the token ids of the pieces packed into one row


@dataclass(frozen=True)
class PretrainConfig:
    """Everything that decides the run. Lengths are in tokens, rates are the peaks of the schedule."""

    output: str
    steps: int = 2700  # of the schedule
    stop_after: int | None = None  # end earlier than the schedule does
    start: str | None = None  # continue from this folder's weights and tokenizer, with fresh moments
    seed: int = 0
    row_length: int = 512
    rows_per_step: int = 8
    hidden_size: int = 192
    intermediate_size: int = 576
    num_layers: int = 8
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    matrix_lr: float = 4e-3
    other_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup: float = 0.03  # share of the run
    checkpoint: str | None = None
    checkpoint_every_s: float = 300.0
    compile: bool = False
    # How often a document of each kind is seen per pass.
    repeats: tuple[tuple[str, float], ...] = (("documented", 3.0), ("plain", 1.0), ("test", 0.25), ("module", 0.5))


def train_tokenizer(documents: list[stdlib.Document]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of `NUM_TOKENS` entries trained on the documents' text."""
    tokenizer = Tokenizer(BPE())
    split = Split(Regex(PIECES), "isolated")
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (f"{d.prompt}\n{d.text}" for d in documents if d.kind != "test")
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == NUM_TOKENS, tokenizer.get_vocab_size()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, documents: list[stdlib.Document], row_length: int
) -> list[Piece]:
    """Return `(kind, token ids)` pieces of at most `row_length` tokens.

    A conversation is cut at the limit; a module becomes one piece per `row_length` tokens, the last one
    ended by `<|endoftext|>`.
    """
    texts = [
        f"<|im_start|>user\n{d.prompt}<|im_end|>\n<|im_start|>assistant\n{d.text}<|im_end|>\n"  # CHAT_TEMPLATE
        if d.prompt
        else f"{d.text}<|endoftext|>"
        for d in documents
    ]
    pieces = []
    for document, encoding in zip(documents, tokenizer.backend_tokenizer.encode_batch(texts), strict=True):
        end = row_length if document.prompt else len(encoding.ids)
        starts = range(0, end, row_length)
        pieces.extend((document.kind, encoding.ids[start : start + row_length]) for start in starts)
    return pieces


def pack_rows(pieces: list[Piece], config: PretrainConfig, rng: random.Random) -> Iterator[Row]:
    """Yield rows (lists of pieces, at most `row_length` tokens together) for ever, pass after pass.

    A fractional repeat is a chance per pass. Each piece goes into the fullest open row with room.
    """
    repeats = dict(config.repeats)
    while True:
        chosen = []
        for kind, ids in pieces:
            count = int(repeats[kind]) + (rng.random() < repeats[kind] % 1)
            chosen.extend([ids] * count)
        rng.shuffle(chosen)
        open_rows: list[tuple[int, Row]] = []
        for ids in chosen:
            fits = [i for i, (used, _) in enumerate(open_rows) if used + len(ids) <= config.row_length]
            if fits:
                best = max(fits, key=lambda i: open_rows[i][0])
                used, row = open_rows.pop(best)
                open_rows.append((used + len(ids), [*row, ids]))
            else:
                open_rows.append((len(ids), [ids]))
            if len(open_rows) > 32:
                fullest = max(range(len(open_rows)), key=lambda i: open_rows[i][0])
                yield open_rows.pop(fullest)[1]


def collate(rows: list[Row], row_length: int) -> dict[str, torch.Tensor]:
    """Return `input_ids`, `position_ids`, `labels` [R, T] and `mask` [R, 1, T, T] (True = visible).

    Positions start at 0 in every piece, a piece sees only itself, and labels are the next token of the
    same piece (-100 where there is none).
    """
    shape = (len(rows), row_length)
    input_ids = torch.zeros(shape, dtype=torch.long)
    position_ids = torch.zeros(shape, dtype=torch.long)
    piece_ids = torch.full(shape, -1)
    labels = torch.full(shape, -100)
    for r, row in enumerate(rows):
        start = 0
        for p, ids in enumerate(row):
            end = start + len(ids)
            tokens = torch.tensor(ids)
            input_ids[r, start:end] = tokens
            position_ids[r, start:end] = torch.arange(len(ids))
            piece_ids[r, start:end] = p
            labels[r, start : end - 1] = tokens[1:]
            start = end
    same = piece_ids[:, :, None] == piece_ids[:, None, :]
    mask = (same & torch.ones(row_length, row_length, dtype=torch.bool).tril())[:, None]
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels, "mask": mask}


def build_model(config: PretrainConfig) -> Qwen3ForCausalLM:
    """Return a freshly initialised model (float32), the same for the same seed."""
    torch.manual_seed(config.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=NUM_ROWS,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=2048,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
            pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
        )
    )


def build_optimizers(model: Qwen3ForCausalLM, config: PretrainConfig) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return `(optimizer, peak rate)`: Muon for the layers' matrices, AdamW for embedding and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, config.matrix_lr), (adamw, config.other_lr)]


def loss_of(model: Qwen3ForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy (nats per token) of a collated batch, in bf16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            attention_mask=batch["mask"],
            use_cache=False,
        ).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def rate_factor(progress: float, warmup: float) -> float:
    """Return the share of the peak rate at `progress` in [0, 1]: linear up, then linear down to 0."""
    return max(0.0, min(progress / warmup, (1.0 - progress) / (1.0 - warmup)))


def train(model: Qwen3ForCausalLM, rows: Iterator[Row], config: PretrainConfig, save: Saver) -> dict[str, float]:
    """Train in place and return the run's figures; `save` writes checkpoints on the way."""
    optimizers = build_optimizers(model, config)
    compute = torch.compile(loss_of) if config.compile else loss_of
    started = last_saved = time.monotonic()
    num_tokens, recent = 0, 0.0
    last_step = config.stop_after or config.steps
    for step in range(1, last_step + 1):
        batch = collate([next(rows) for _ in range(config.rows_per_step)], config.row_length)
        loss = compute(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate_factor((step - 1) / config.steps, config.warmup)
            optimizer.step()
            optimizer.zero_grad()
        num_tokens += int((batch["labels"] != -100).sum())
        recent = loss.item() if step == 1 else 0.98 * recent + 0.02 * loss.item()
        if step % 20 == 0:
            rate = num_tokens / (time.monotonic() - started)
            logger.info("step %d, %d tokens, %.0f tokens/s, smoothed loss %.3f", step, num_tokens, rate, recent)
        if config.checkpoint and time.monotonic() - last_saved > config.checkpoint_every_s:
            save(Path(config.checkpoint), {"steps": step, "smoothed_loss": round(recent, 4)})
            last_saved = time.monotonic()
    return {
        "steps": last_step,
        "tokens": num_tokens,
        "train_seconds": round(time.monotonic() - started),
        "tokens_per_second": round(num_tokens / (time.monotonic() - started)),
        "smoothed_loss": round(recent, 4),
    }


@torch.no_grad()
def held_out_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, functions: list[stdlib.Function], row_length: int
) -> float:
    """Return the mean cross-entropy (nats per token) on the bodies of held-out functions."""
    total, count = 0.0, 0
    for function in functions:
        messages = stdlib.prompt_messages(function)
        answer = [*messages, {"role": "assistant", "content": function.body}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(answer, return_dict=False)[:row_length]
        if len(ids) <= len(prompt):
            continue
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        labels = torch.tensor(ids[len(prompt) :])
        total += F.cross_entropy(logits.float(), labels, reduction="sum").item()
        count += len(labels)
    return total / count


@dataclass
class Saver:
    """Writes the model, its tokenizer and `provenance.json` as one transformers folder."""

    model: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerFast
    origin: dict[str, Any]

    def __call__(self, folder: Path, figures: dict[str, Any]) -> None:
        """Write bfloat16 weights aside and move file by file, so that readers see whole files."""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
            copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(aside)
            self.tokenizer.save_pretrained(aside)
            write_json(Path(aside) / "provenance.json", self.origin | figures)
            for path in Path(aside).iterdir():
                path.chmod(0o644)
                os.replace(path, folder / path.name)
        logger.info("wrote %s", folder)


def describe_run(config: PretrainConfig, documents: list[stdlib.Document], pieces: list[Piece]) -> dict[str, Any]:
    """Return what is known before training: command, versions, commit, and the corpus with its hash."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update("\0".join([*asdict(document).values(), ""]).encode())
    tokens: Counter[str] = Counter()
    for kind, ids in pieces:
        tokens[kind] += len(ids)
    return provenance(
        config,
        license="trained on the source of Python's standard library (PSF License Version 2)",
        corpus={
            "modules": sum(1 for _ in stdlib.iter_modules(stdlib.stdlib_root())),
            "documents": dict(Counter(document.kind for document in documents)),
            "tokens": dict(tokens),
            "sha256": digest.hexdigest(),
        },
    )


def run(config: PretrainConfig) -> dict[str, Any]:
    """Train and write the target; return the figures written to `provenance.json`."""
    root = stdlib.stdlib_root()
    documents = list(stdlib.training_documents(root))
    held_out = stdlib.prompts(root, held_out=True)
    tokenizer = AutoTokenizer.from_pretrained(config.start) if config.start else train_tokenizer(documents)
    pieces = encode_documents(tokenizer, documents, config.row_length)
    model = build_model(config)
    if config.start:
        model = Qwen3ForCausalLM.from_pretrained(config.start, dtype=torch.float32).train()
    ends = {"eos_token_id": model.config.eos_token_id, "pad_token_id": model.config.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=False, **ends)
    origin = describe_run(config, documents, pieces)
    if config.start:
        origin["started_from"] = json.loads((Path(config.start) / "provenance.json").read_text(encoding="utf-8"))
    save = Saver(model, tokenizer, origin)
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    figures |= train(model, pack_rows(pieces, config, random.Random(config.seed)), config, save)
    save(Path(config.output), figures)
    model = Qwen3ForCausalLM.from_pretrained(config.output, dtype=torch.float32).eval()
    figures["held_out_loss"] = round(held_out_loss(model, tokenizer, held_out, config.row_length), 4)
    spread = held_out[:: max(1, math.ceil(len(held_out) / 100))]
    answers = [stdlib.complete(model, tokenizer, function, MAX_NEW_TOKENS) for function in spread]
    figures["greedy_completions"] = {"max_new_tokens": MAX_NEW_TOKENS, **stdlib.summarise(answers)}
    save(Path(config.output), figures)
    return figures


def parse_arguments() -> PretrainConfig:
    """Read the command line; every other choice is in `PretrainConfig`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", required=True, help="folder of the trained target")
    parser.add_argument("--steps", type=int, default=PretrainConfig.steps)
    parser.add_argument("--stop-after", type=int, help="end after so many steps of the schedule")
    parser.add_argument("--start", help="folder of an earlier run to continue from")
    parser.add_argument("--matrix-lr", type=float, default=PretrainConfig.matrix_lr)
    parser.add_argument("--other-lr", type=float, default=PretrainConfig.other_lr)
    parser.add_argument("--seed", type=int, default=PretrainConfig.seed)
    parser.add_argument("--checkpoint", help="folder for checkpoints on the way")
    parser.add_argument("--compile", action="store_true", help="compile the training step")
    return PretrainConfig(**vars(parser.parse_args()))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run(parse_arguments())
