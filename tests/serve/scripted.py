"""The endpoint over the real engine on a port, with drafts that are written down: right, wrong, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from fakes import listening
from models import DRAFTER, load, save_random_checkpoint
from operated import add_operations

from lilicorr.blocks import DraftOutput, Proposal
from lilicorr.chat import render_prompt
from lilicorr.checkpoint import load_draft_model
from lilicorr.config import DrafterConfig, EngineConfig
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.engine.engine import Engine
from lilicorr.tiny import tiny_target_folder
from lilicorr.verify import Sampling
from serve_app.api import build_api
from serve_app.args import AppArgs
from serve_app.detokenize import TextStream
from serve_app.replica import Replica
from serve_app.served_model import ServedModel, served_model


def mostly(_seed: int, position: int) -> bool:
    """Right but for every fifth position."""
    return position % 5 > 0


def always(_seed: int, _position: int) -> bool:
    """Right everywhere."""
    return True


class KnownText(torch.nn.Module):
    """Drafts what the reference decoder answers, wrong where `right`(seed, position) is False or no text is known.

    `num_drafts`(seed) is how many slots of a block are to be verified; None: all of them.
    """

    def __init__(self, right: Callable[[int, int], bool] = mostly) -> None:
        super().__init__()
        self.texts: dict[int, list[int]] = {}  # prompt and answer by the request's seed
        self.right = right
        self.num_drafts: Callable[[int], int] | None = None

    def propose(self, draft: DraftOutput, sampling: Sampling) -> Proposal:
        seeds, starts = sampling.seeds.tolist(), sampling.positions.tolist()
        num_slots = draft.hidden.shape[1]
        rows = [[self._token(seed, start + slot) for slot in range(num_slots)] for seed, start in zip(seeds, starts)]
        lengths = None if self.num_drafts is None else torch.tensor([self.num_drafts(seed) for seed in seeds])
        return Proposal(torch.tensor(rows), lengths=lengths)

    def _token(self, seed: int, position: int) -> int:
        text = self.texts.get(seed, [])
        if position >= len(text):
            return 0
        return text[position] if self.right(seed, position) else (text[position] + 1) % 256


@dataclass(frozen=True)
class Served:
    """A running endpoint and the reference decoder of the same weights."""

    url: str
    model: ServedModel
    replica: Replica
    decoder: Decoder
    head: KnownText

    def text(self, prompt_ids: list[int], params: SamplingParams) -> tuple[str, int]:
        """What decode.py answers, and its number of tokens; from here on the drafts of this seed are right."""
        token_ids = self.decoder.generate(prompt_ids, params).token_ids
        self.head.texts[params.seed] = prompt_ids + token_ids
        stream = TextStream(self.model.token_table)
        return stream.push(token_ids).text + stream.finish(), len(token_ids)

    def chat_prompt(self, question: str) -> list[int]:
        return render_prompt(self.model.tokenizer, [{"role": "user", "content": question}], {})


@contextmanager
def scripted_endpoint(
    folder: Path, config: EngineConfig, max_queue: int = 20, drafter: DrafterConfig = DRAFTER
) -> Iterator[Served]:
    """The endpoint of a random target called `tiny`, with /metrics."""
    target, checkpoint = tiny_target_folder(folder / "target"), folder / "checkpoint"
    save_random_checkpoint(checkpoint, target, seed=0, drafter=drafter)
    args = AppArgs(checkpoint=str(checkpoint), target=str(target), model_name="tiny", max_queue=max_queue)
    reference, loaded, head = load(target), load(target), KnownText()
    decoder = Decoder(reference, load_draft_model(checkpoint, reference))
    draft_model = load_draft_model(checkpoint, loaded)
    draft_model.head = head
    engine = Engine(loaded, draft_model, config)
    model, replica = served_model(args, engine), Replica(engine, config.max_running + max_queue, args.stall_s)
    app = build_api(model, replica)
    add_operations(app, model, replica, config.max_running)
    with listening(app) as url:
        yield Served(url, model, replica, decoder, head)
    replica.close()
