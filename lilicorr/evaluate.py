"""Evaluation: prompt sets through several systems side by side.

Place in the flow: `pipelines/evaluate.py` loads target, draft models and prompts and calls `run_sets`; its
results go to a JSON file, from which `summary`, `tables` and `plots` draw. Every system answers a prompt before the
next prompt starts, so timings are comparable; `throughput` decodes many at once. The turns of a conversation are
decoded in order, with the autoregressive reply as history for all systems, so every system sees the same prompts.

    python -m lilicorr.evaluate --table 5 --results runs/demo/evaluate
    python -m lilicorr.evaluate --table all --results runs/demo/evaluate --out tables.md
    python -m lilicorr.evaluate --benchmark math500 --path math500.jsonl        # what a file holds, before a run

Paper: section 4.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lilicorr.acceptance import (
    Answer,
    BlockRecord,
    Sums,
    add_sums,
    answer_sums,
    by_category,
    figures,
    length_class,
    paired_gains,
    resamples,
    stack_sums,
)
from lilicorr.benchmarks import BENCHMARKS, benchmark_facts
from lilicorr.blocks import DraftOutput, Proposal, Verdict
from lilicorr.chat import ChatError, Message, answer_text
from lilicorr.config import EngineConfig, EvaluateConfig, fingerprint
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.draft_model import DraftModel
from lilicorr.engine.engine import Engine
from lilicorr.engine.request import Request
from lilicorr.lattice import candidates
from lilicorr.provenance import write_atomic
from lilicorr.results import read_results
from lilicorr.tables import LENGTHS, TABLES, tables_text
from lilicorr.target import Target

logger = logging.getLogger(__name__)

AUTOREGRESSIVE = "autoregressive"  # always measured; speed-ups are relative to it
DFLASH = "dflash"  # gains in tau are relative to the system of this name
EXACT_DTYPES = (torch.float32, torch.float64)  # in which greedy outputs must agree token for token
# The prompts themselves are in the key, other seeds are other results, and `temperature` is that of the results.
OTHER_RESULTS = ("sampled_seeds", "sampled_temperature", "concurrencies", "concurrent_sets")
NOT_IN_KEY = ("sets", "max_prompts", *OTHER_RESULTS)
WARM_UP_TOKENS = 16
LOG_EVERY_S = 30.0
UNKNOWN = -2  # no token: a draft that the target refused

Render = Callable[[list[Message]], list[int]]  # messages that end in a user turn -> prompt ids


@dataclass(frozen=True)
class Prompt:
    """One conversation to decode: system and user turns, without assistant turns."""

    id: str
    messages: list[Message]
    category: str = ""


class System:
    """A row of the table: a decoder that records its blocks outside the measured time."""

    def __init__(self, target: Target, draft_model: DraftModel | None) -> None:
        self.decoder = Decoder(target, draft_model)
        self.num_slots = self.decoder.num_slots
        self.num_candidates = draft_model.spec.num_candidates if draft_model is not None else 0

    def answer(self, prompt_ids: list[int], params: SamplingParams) -> Answer:
        """Decode one turn."""
        recorder = _Recorder(self.num_candidates)
        decoded = self.decoder.generate(prompt_ids, params, recorder)
        seconds = decoded.seconds - recorder.seconds
        return Answer(decoded.token_ids, decoded.num_blocks, decoded.num_block_tokens, seconds, recorder.blocks)

    def sums(self, answers: Sequence[Answer]) -> Sums:
        """What the turns of one prompt add to the figures."""
        return add_sums([answer_sums(answer, self.num_slots, self.num_candidates) for answer in answers])


class EngineSystem(System):
    """A row of the table decoded by the engine, one request at a time.

    The engine does not tell what it drafted in vain, so the prefixes of any candidate and of top choices are unknown.
    """

    def __init__(self, target: Target, draft_model: DraftModel | None) -> None:
        super().__init__(target, draft_model)
        self.num_candidates = 0
        self.engine = Engine(target, draft_model, EngineConfig(max_running=1, prefix_cache=False))

    def answer(self, prompt_ids: list[int], params: SamplingParams) -> Answer:
        """Decode one turn; raises RuntimeError for a target whose logits are not finite."""
        chunks, began = [], time.perf_counter()
        self.engine.submit(Request("turn", prompt_ids, params))
        while not (chunks and chunks[-1].last):
            chunks += self.engine.step()
        seconds = time.perf_counter() - began
        while self.engine.busy:  # a GPU is a step ahead of what is known: the answer does not wait for it
            self.engine.step()
        if chunks[-1].error is not None:
            raise RuntimeError(chunks[-1].error)
        token_ids, blocks = list(chunks[0].token_ids), []
        for chunk in chunks[1:]:
            if self.num_slots:
                drafts = [*chunk.token_ids[: chunk.num_accepted], *[UNKNOWN] * (chunk.num_drafted - chunk.num_accepted)]
                blocks.append(BlockRecord(len(token_ids), drafts, [[]] * self.num_slots, chunk.num_accepted))
            token_ids += chunk.token_ids
        return Answer(token_ids, len(chunks) - 1, len(token_ids) - len(chunks[0].token_ids), seconds, blocks)

    def sums(self, answers: Sequence[Answer]) -> Sums:
        """As `System.sums`, without what is unknown."""
        unknown = {name: np.array(np.nan) for name in ("oracle_prefix", "top1_prefix")}
        return super().sums(answers) | unknown


@dataclass
class _Recorder:
    """Observer of one decode; `seconds` is the time it took itself."""

    num_candidates: int
    blocks: list[BlockRecord] = field(default_factory=list)
    seconds: float = 0.0
    start: int = 1  # the token at index 0 is the prefill's

    def __call__(self, draft: DraftOutput | None, proposal: Proposal, verdict: Verdict) -> None:
        if draft is None:
            return
        num_accepted = int(verdict.num_accepted)  # waits for the device: up to here it is the decoder's time
        began = time.perf_counter()
        tokens = candidates(draft, self.num_candidates).token_ids[0].tolist()
        self.blocks.append(BlockRecord(self.start, proposal.token_ids[0].tolist(), tokens, num_accepted))
        self.start += num_accepted + 1
        self.seconds += time.perf_counter() - began


MakeSystem = Callable[[Target, DraftModel | None], System]  # how a system decodes


def run_sets(
    target: Target,
    draft_models: dict[str, DraftModel],
    sets: dict[str, Sequence[Prompt]],
    config: EvaluateConfig,
    render: Render,
    identity: dict[str, str],
    previous: dict[str, Any],
    save: Callable[[dict[str, Any]], None],
    make_system: MakeSystem = System,
) -> dict[str, Any]:
    """Evaluate every set with autoregression and the draft models; `save` is called after each with all so far.

    A set that `previous` results hold for the same inputs is kept as it is. `identity` stands for the weights
    of target and draft models: with the config and the prompts it makes the fingerprint of a set.

    Returns {"systems": {name: {set: figures}}, "sets": {set: {"fingerprint", "num_turns", ...}}}; the figures
    are those of `acceptance.figures`, some also `by_category` and `by_length` of the input, and
    `matches_autoregressive`, the number of prompts whose output is the autoregressive one. Raises ValueError for a set
    none of whose prompts can be asked, and RuntimeError where a greedy output in fp32 or fp64 differs from the
    autoregressive one.
    """
    if AUTOREGRESSIVE in draft_models:
        raise ValueError(f"no draft model may be called {AUTOREGRESSIVE!r}")
    systems = {AUTOREGRESSIVE: make_system(target, None)}
    systems |= {name: make_system(target, draft_model) for name, draft_model in draft_models.items()}
    settings = key_settings(config, list(systems))
    keys, facts, found = {}, {}, {}  # by set; `found` are the figures of every system

    def results() -> dict[str, Any]:
        done = [name for name in sets if name in found]  # in the order of the sets, whichever was measured first
        by_system = {system: {name: found[name][system] for name in done} for system in systems}
        return {"systems": by_system, "sets": {name: facts[name] for name in done}}

    for name, prompts in sets.items():
        key = fingerprint(settings, identity, list(systems), [dataclasses.asdict(prompt) for prompt in prompts])
        keys[name], before = key, previous.get("sets", {}).get(name, {}).get("fingerprint")
        if before == key:
            logger.info("%s: done before, kept", name)
            facts[name] = previous["sets"][name]
            found[name] = {system: previous["systems"][system][name] for system in systems}
        elif before is not None:
            logger.info("%s: prompts, weights, code or settings changed (%s -> %s), measured again", name, before, key)
    for name in [name for name in sets if name not in found]:
        runner = SetRunner(name, target, systems, config, render)
        found[name] = runner.run(sets[name])
        facts[name] = {"fingerprint": keys[name], **runner.report()}
        save(results())
    return results()


def key_settings(config: EvaluateConfig, systems: Sequence[str]) -> dict[str, Any]:
    """The settings that decide the results of these systems: part of the fingerprint of a set.

    What only says which other results there are is left out, so greedy results outlive a change of it.
    """
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in NOT_IN_KEY}
    settings["systems"] = {
        name: {field: value for field, value in system.items() if field != "only"}
        for name, system in settings["systems"].items()
        if name in systems
    }
    return settings


class SetRunner:
    """One pass of all systems over one prompt set."""

    def __init__(
        self, name: str, target: Target, systems: dict[str, System], config: EvaluateConfig, render: Render
    ) -> None:
        self.name, self.target, self.systems, self.config, self.render = name, target, systems, config, render
        self.params = SamplingParams(
            config.max_new_tokens, config.temperature, seed=config.seed, stop_ids=target.eos_ids
        )
        self.must_match = config.temperature == 0 and target.embed.dtype in EXACT_DTYPES
        self.num_turns = 0
        self.num_dropped = 0  # turns whose prompt leaves no room for the answer; they end their conversation
        self.num_refused = 0  # turns that the target's chat template takes no part in; they end it too
        self.num_limited = 0  # turns whose answer the limit ended

    def run(self, prompts: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
        """The figures of every system; errors as in `run_sets`."""
        sums: dict[str, list[Sums]] = {name: [] for name in self.systems}
        categories: list[str] = []  # of the prompts that were answered
        lengths: list[str] = []  # classes of their longest inputs
        matches = dict.fromkeys(self.systems, 0)
        began = logged = time.perf_counter()
        for done, prompt in enumerate(prompts, start=1):
            turns, longest = self._turns(prompt)
            if turns:
                categories.append(prompt.category)
                lengths.append(length_class(longest))
            for name, system in self.systems.items() if turns else ():
                sums[name].append(system.sums([turn[name] for turn in turns]))
                matches[name] += all(turn[name].token_ids == turn[AUTOREGRESSIVE].token_ids for turn in turns)
            now = time.perf_counter()
            if now - logged > LOG_EVERY_S or done == len(prompts):
                left = (now - began) / done * (len(prompts) - done)
                logger.info("%s: %d of %d prompts, %.0f s left", self.name, done, len(prompts), left)
                logged = now
        if not sums[AUTOREGRESSIVE]:
            raise ValueError(
                f"set {self.name}: none of {len(prompts)} prompts can be asked; the chat template refuses "
                f"{self.num_refused}, the context of {self.target.max_length} has no room for the others with "
                f"max_new_tokens {self.config.max_new_tokens}"
            )
        return self._figures(sums, matches, categories, lengths)

    def report(self) -> dict[str, int]:
        """What was run and what was left out."""
        return {name: getattr(self, name) for name in ("num_turns", "num_dropped", "num_refused", "num_limited")}

    def _turns(self, prompt: Prompt) -> tuple[list[dict[str, Answer]], int]:
        """The answers of every system to the turns of one conversation, up to one that does not fit; the tokens of the
        longest input."""
        turns: list[dict[str, Answer]] = []
        longest = 0
        history: list[Message] = []
        for message in prompt.messages:
            history.append(message)
            if message["role"] != "user":
                continue
            try:
                prompt_ids = self.render(history)
            except ChatError as error:
                logger.warning("%s: prompt %s is left out: %s", self.name, prompt.id, error)
                self.num_refused += 1
                break
            if len(prompt_ids) + self.config.max_new_tokens > self.target.max_length:
                self.num_dropped += 1
                break
            answers = self._answers(f"{prompt.id} (turn {len(turns) + 1})", prompt_ids)
            turns.append(answers)
            longest = max(longest, len(prompt_ids))
            reply = answers[AUTOREGRESSIVE].token_ids
            self.num_turns += 1
            self.num_limited += reply[-1] not in self.params.stop_ids
            if message is not prompt.messages[-1]:
                history.append({"role": "assistant", "content": answer_text(self.target.tokenizer, reply)})
        return turns, longest

    def _answers(self, where: str, prompt_ids: list[int]) -> dict[str, Answer]:
        """One turn by every system; the first calls of a set are slower and are made before it is measured."""
        if self.num_turns == 0:
            short = dataclasses.replace(self.params, max_new_tokens=min(WARM_UP_TOKENS, self.config.max_new_tokens))
            for system in self.systems.values():
                system.answer(prompt_ids, short)
        answers = {name: system.answer(prompt_ids, self.params) for name, system in self.systems.items()}
        if self.must_match:
            for name, answer in answers.items():
                self._check(where, prompt_ids, name, answer.token_ids, answers[AUTOREGRESSIVE].token_ids)
        return answers

    def _check(self, where: str, prompt_ids: list[int], name: str, got: list[int], expected: list[int]) -> None:
        """Raise RuntimeError where a system's greedy output is not the autoregressive one."""
        if got == expected:
            return
        pairs = enumerate(zip([*got, None], [*expected, None]))
        place, (found, wanted) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
        prefix = torch.tensor([[*prompt_ids, *expected[:place]]], device=self.target.device)
        best = self.target.logits(self.target.forward(prefix).hidden[0, -1]).topk(2).values
        raise RuntimeError(
            f"{name} differs from {AUTOREGRESSIVE} on set {self.name}, prompt {where}: answer token {place} is "
            f"{found}, not {wanted}; the target's two best logits there are {float(best[0] - best[1]):.3g} apart"
        )

    def _figures(
        self, sums: dict[str, list[Sums]], matches: dict[str, int], categories: list[str], lengths: list[str]
    ) -> dict[str, dict[str, Any]]:
        """Figures of every system over the same resamples of the prompts."""
        tables = {name: stack_sums(prompts) for name, prompts in sums.items()}
        counts = resamples(len(sums[AUTOREGRESSIVE]), self.config.bootstrap_samples, self.config.seed)
        found = {}
        for name, table in tables.items():
            rival = None if name in (AUTOREGRESSIVE, DFLASH) else tables.get(DFLASH)
            values = figures(table, tables[AUTOREGRESSIVE], rival, counts)
            others = {other: tables[other] for other in tables if other not in (name, AUTOREGRESSIVE)}
            found[name] = {**values, "matches_autoregressive": matches[name]}
            if name != AUTOREGRESSIVE:
                found[name]["tau_gain_over"] = paired_gains(table, others, counts)
            kinds = by_category(table, tables[AUTOREGRESSIVE], categories, counts)
            if kinds:
                found[name]["by_category"] = kinds
            classes = by_category(table, tables[AUTOREGRESSIVE], lengths, counts)
            found[name]["by_length"] = {length: classes[length] for length in sorted(classes, key=int)}
        return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print tables of a finished evaluation, or what a benchmark's file holds."""
    parser = argparse.ArgumentParser(description="The paper's tables from the results of a run.")
    parser.add_argument("--table", help=f"all, {LENGTHS}, or one of {', '.join(map(str, TABLES))}")
    parser.add_argument("--results", type=Path, help="folder of results.json: runs/PROFILE/evaluate")
    parser.add_argument("--out", type=Path, help="write there instead of printing")
    parser.add_argument("--benchmark", help=f"one of {', '.join(BENCHMARKS)}")
    parser.add_argument("--path", type=Path, help="file of the benchmark, where no package has it")
    arguments = parser.parse_args(argv)
    try:
        if arguments.benchmark:
            text = json.dumps(benchmark_facts(arguments.benchmark, arguments.path), indent=2)
        elif arguments.table and arguments.results:
            text = tables_text(arguments.table, read_results(arguments.results))
        else:
            parser.error("give --table and --results, or --benchmark")
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
    if arguments.out:
        write_atomic(arguments.out, f"{text}\n".encode())
    else:
        print(text)


if __name__ == "__main__":
    main()
