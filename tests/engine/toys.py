"""Small models, scripted heads and random requests for the engine's tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lilicorr.blocks import DraftOutput, Proposal
from lilicorr.config import DrafterConfig, EngineConfig, YarnConfig
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.drafter import block_spec, drafter_shape
from lilicorr.engine.engine import Engine
from lilicorr.engine.request import Request, TokenChunk
from lilicorr.heads import HEADS
from lilicorr.target import Target
from lilicorr.verify import Sampling
from random_target import make_target
from test_heads import SMALL

VOCAB = 12  # few enough tokens that an untrained drafter is right now and then


def toy_target(family: str = "qwen3", vocab: int = VOCAB, **changes) -> Target:
    """Two random layers in fp32, the second captured."""
    settings = dict(dtype=torch.float32, num_layers=2, num_captured=1, vocab=vocab) | changes
    return make_target(family, **settings)


def toy_draft_model(
    target: Target,
    head: str,
    block_size: int = 4,
    seed: int = 5,
    num_candidates: int = 3,
    head_config: dict[str, Any] | None = None,
    yarn: YarnConfig | None = None,
    vocab_ids: torch.Tensor | None = None,
) -> DraftModel:
    """One random drafter layer and a random head."""
    torch.manual_seed(seed)
    config = DrafterConfig(num_layers=1, block_size=block_size, num_candidates=num_candidates)
    shape = replace(drafter_shape(config, target.config), yarn=yarn)
    spec = block_spec(config, target.config, target.mask_token_id, HEADS[head].layouts[0])
    head_config = SMALL[head] | (head_config or {})
    model = build_draft_model(shape, spec, head, head_config, target, vocab_ids).to(target.embed.dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


class ScriptedHead(torch.nn.Module):
    """Drafts what follows in the text of the request, which its seed names; `script` may change a slot.

    script(seed, position, token) is the token drafted for an absolute position where the text has `token`. It also
    checks that every block is anchored where the text says. `num_verified`(position of slot 1) is how many slots are
    to be verified; None: all.
    """

    def __init__(
        self,
        texts: dict[int, list[int]],
        script: Callable[[int, int, int], int],
        num_verified: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__()
        self.texts, self.script, self.num_verified = texts, script, num_verified

    def propose(self, draft: DraftOutput, sampling: Sampling) -> Proposal:
        rows = []
        anchors = zip(draft.anchor_ids.tolist(), sampling.seeds.tolist(), sampling.positions.tolist())
        for anchor_id, seed, start in anchors:
            text = self.texts[seed]
            assert text[start - 1] == anchor_id, f"request {seed} is anchored at {start - 1} with {anchor_id}"
            positions = range(start, start + draft.hidden.shape[1])
            rows.append([self.script(seed, p, text[p] if p < len(text) else 0) for p in positions])
        lengths = None
        if self.num_verified is not None:
            lengths = torch.tensor([self.num_verified(start) for start in sampling.positions.tolist()])
        return Proposal(torch.tensor(rows), lengths=lengths)


def random_prompts(count: int, seed: int = 0, longest: int = 200, vocab: int = VOCAB) -> list[list[int]]:
    """Prompts of mixed lengths, of which many share one of three beginnings."""
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(length)]

    beginnings = [[]] + [text(length) for length in (64, 100, 130)]
    prompts = []
    for _ in range(count):
        beginning = rng.choice(beginnings)
        prompts.append(beginning + text(rng.randint(1, rng.choice([6, longest - len(beginning)]))))
    return prompts


def reference_runs(
    target: Target, draft_model: DraftModel | None, requests: list[Request]
) -> dict[str, list[list[int]]]:
    """What `decode.py` yields for each request, block by block."""
    decoder = Decoder(target, draft_model)
    return {request.id: list(decoder.stream(request.prompt_ids, request.params)) for request in requests}


def run_all(
    engine: Engine,
    requests: list[Request],
    arrivals: random.Random | None = None,
    before_step: Callable[[dict[str, list[TokenChunk]]], None] | None = None,
) -> dict[str, list[TokenChunk]]:
    """Submit requests, all at once or at random steps, and return the chunks of each."""
    chunks: dict[str, list[TokenChunk]] = {request.id: [] for request in requests}
    waiting = list(requests)
    while waiting or engine.busy:
        count = len(waiting) if arrivals is None else min(len(waiting), arrivals.randint(0, 6))
        for request in waiting[:count]:
            engine.submit(request)
        del waiting[:count]
        if before_step is not None:
            before_step(chunks)
        if engine.busy:
            for chunk in engine.step():
                assert not (chunks[chunk.request_id] and chunks[chunk.request_id][-1].last), chunk
                chunks[chunk.request_id].append(chunk)
    return chunks


def runs_of(chunks: list[TokenChunk]) -> list[list[int]]:
    """The tokens of each chunk."""
    return [chunk.token_ids for chunk in chunks]


def answer_of(chunks: list[TokenChunk]) -> list[int]:
    """All tokens."""
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def toy_engine(target: Target, draft_model: DraftModel | None, **config) -> Engine:
    """An engine of 8 rows and 40 pages."""
    return Engine(target, draft_model, EngineConfig(**{"max_running": 8, "num_pages": 40, **config}))


def requests_of(prompts: list[list[int]], params: Callable[[int], SamplingParams]) -> list[Request]:
    """One request for each prompt, called "0", "1", ..."""
    return [Request(str(index), prompt, params(index)) for index, prompt in enumerate(prompts)]
