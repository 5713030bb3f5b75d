"""Acceptance length of a draft model while it trains: a few held-out prompts, greedy.

Place in the flow: `pipelines/train.py` asks for it every `train.eval_steps` steps. Paper: section 4 (tau).
"""

from __future__ import annotations

from lilicorr.chat import render_prompt
from lilicorr.config import PipelineConfig
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.prompts import read_conversations
from lilicorr.target import Target
from lilicorr.training import Trainer

PROBE_PROMPTS, PROBE_TOKENS = 8, 64


def probe_prompts(config: PipelineConfig, target: Target) -> list[list[int]]:
    """The first turns of a few held-out conversations; raises ValueError if there is none."""
    held_out = read_conversations(config.directory / "prepare" / "held_out.parquet", stop=PROBE_PROMPTS)
    if not held_out:
        raise ValueError("train.eval_steps needs held-out prompts, prepare left none")
    prompts = []
    for conversation in held_out:
        turns = [message["role"] for message in conversation.messages].index("user") + 1
        prompts.append(render_prompt(target.tokenizer, conversation.messages[:turns], config.target.template_kwargs))
    return [prompt for prompt in prompts if len(prompt) + PROBE_TOKENS <= target.max_length]


def measure_tau(trainer: Trainer, target: Target, prompts: list[list[int]]) -> float | None:
    """Tokens per verified block on `prompts`, greedy; None if every answer ended in its first token.

    All ranks call it, rank 0 measures; the others get None.
    """
    draft_model = trainer.whole_model()
    if draft_model is None:
        return None
    params = SamplingParams(PROBE_TOKENS, stop_ids=target.eos_ids)
    decoder = Decoder(target, draft_model)
    with trainer.autocast():
        answers = [decoder.generate(prompt, params) for prompt in prompts]
    num_blocks = sum(answer.num_blocks for answer in answers)
    return sum(answer.num_block_tokens for answer in answers) / num_blocks if num_blocks else None
