"""Decoding token by token on the model of transformers, every setting by its definition: no cache, no blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lilicorr.decode import SamplingParams
from lilicorr.logprobs import TokenLogprobs
from lilicorr.target import Target
from lilicorr.verify import draw_by_noise


@torch.no_grad()
def model_logits(target: Target, token_ids: list[int]) -> Tensor:
    """Of transformers, at every position, [T, V]."""
    return target.model(torch.tensor([token_ids])).logits[0]


def next_law(logits: Tensor, prompt: list[int], answer: list[int], params: SamplingParams) -> Tensor:
    """The probabilities [V] of the token after `answer`, in fp64."""
    x = [float(value) for value in logits]
    for token, bias in params.logit_bias:
        x[token] += bias
    if len(answer) < params.min_new_tokens:
        for token in params.stop_ids:
            x[token] = -math.inf
    for token in {*prompt, *answer}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(answer):
        x[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
    if params.temperature == 0:
        return torch.nn.functional.one_hot(torch.tensor(x.index(max(x))), len(x)).double()
    weights = [math.exp((value - max(x)) / params.temperature) for value in x]
    order = sorted(range(len(x)), key=lambda token: (-weights[token], token))
    order = [token for token in order if weights[token] >= params.min_p]
    order = order[: params.top_k or None]
    total, mass, law = sum(weights[token] for token in order), 0.0, torch.zeros(len(x), dtype=torch.float64)
    for token in order:
        if mass < params.top_p * total or params.top_p == 1:
            law[token] = weights[token]
        mass += weights[token]
    return law / law.sum()


def brute_force(target: Target, prompt: list[int], params: SamplingParams) -> list[int]:
    """The answer."""
    answer: list[int] = []
    while len(answer) < params.max_new_tokens and not set(answer) & set(params.stop_ids):
        law = next_law(model_logits(target, prompt + answer)[-1], prompt, answer, params)
        key = torch.tensor([params.seed]), torch.tensor([len(prompt) + len(answer)])
        answer.append(int(draw_by_noise(law[None], *key)))
    return answer


def check_logprobs(found: list[TokenLogprobs], target: Target, token_ids: list[int], num_top: int) -> None:
    """Reports on the last tokens of a text against a log-softmax of the model's own logits."""
    start = len(token_ids) - len(found)
    laws = model_logits(target, token_ids)[start - 1 : -1].log_softmax(dim=-1)
    assert len(laws) == len(found)
    for report, token_id, law in zip(found, token_ids[start:], laws, strict=True):
        assert report.token_id == token_id
        assert abs(report.logprob - float(law[token_id])) < 1e-4
        ids, values = [token for token, _ in report.top], [value for _, value in report.top]
        assert len(set(ids)) == len(ids) == min(num_top, len(law))
        assert sorted(report.top, key=lambda entry: (-entry[1], entry[0])) == report.top
        torch.testing.assert_close(torch.tensor(values), law[ids].float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.tensor(values), law.topk(len(ids)).values.float(), rtol=1e-4, atol=1e-4)
