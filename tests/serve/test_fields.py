"""What the fields of a chat request do to its answer, over an engine that echoes."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import CHAT, END, NUM_SLOTS, EchoEngine, ask, body, events
from fastapi.testclient import TestClient


def streamed(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    return events(client, CHAT, body(**fields))


def collected(parsed: list[dict[str, Any]], index: int, key: str) -> list[Any]:
    """Values of a list-valued field of a choice, over all events."""
    choices = [choice for event in parsed for choice in event["choices"] if choice["index"] == index]
    return [value for choice in choices for value in choice.get(key) or []]


def test_every_setting_reaches_the_engine(client: TestClient, engine: EchoEngine) -> None:
    fields = {
        "min_p": 0.25, "presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.25,
        "logit_bias": {"5": -100, "262": 2.5}, "min_tokens": 3, "stop_token_ids": [7, END], "cache_salt": "mine",
        "logprobs": True, "top_logprobs": 4,
    }  # fmt: skip
    ask(client, **fields)
    (request,), (params,) = engine.requests, engine.params
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.25, 1, -0.5)
    assert (params.repetition_penalty, params.logit_bias) == (1.25, ((5, -100.0), (262, 2.5)))
    assert (params.min_new_tokens, params.stop_ids, params.num_logprobs) == (3, (END, 7), 4)
    assert request.cache_salt == "mine" and request.num_prompt_logprobs is None
    ask(client, **dict.fromkeys(fields), n=None, ignore_eos=None, skip_special_tokens=None)  # null is the default
    ask(client)
    plain, empty = engine.params[1:]
    assert (plain.min_p, plain.presence_penalty, plain.repetition_penalty) == (0, 0, 1)
    assert (plain.logit_bias, plain.min_new_tokens, plain.stop_ids, plain.num_logprobs) == ((), 0, (END,), None)
    assert plain.seed != empty.seed


def test_choices_have_seeds_of_their_own(client: TestClient, engine: EchoEngine) -> None:
    answer = ask(client, n=3, seed=11)
    ask(client, n=3, seed=11)
    ask(client, n=3)
    seeds = [params.seed for params in engine.params]
    assert seeds[:3] == seeds[3:6] and seeds[0] == 11 and len(set(seeds)) == 6
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"hello there"}
    one = ask(client)["usage"]
    assert answer["usage"]["prompt_tokens"] == one["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * one["completion_tokens"]
    assert answer["usage"]["total_tokens"] == one["prompt_tokens"] + 3 * one["completion_tokens"]


def test_choices_of_a_stream(client: TestClient) -> None:
    parsed = streamed(client, n=3, stream_options={"include_usage": True})
    for index in range(3):
        choices = [event["choices"][0] for event in parsed[:-1] if event["choices"][0]["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "hello there"
        assert [choice["finish_reason"] for choice in choices] == (len(choices) - 1) * [None] + ["stop"]
    assert parsed[-1]["usage"] == ask(client, n=3)["usage"]


def test_ignore_eos_and_stop_token_ids(client: TestClient) -> None:
    on = ask(client, "ab", ignore_eos=True, max_tokens=7)
    assert on["choices"][0]["message"]["content"] == "ababa"
    assert (on["choices"][0]["finish_reason"], on["usage"]["completion_tokens"]) == ("length", 7)
    stopped = ask(client, "abcd", ignore_eos=True, stop_token_ids=[ord("c")], return_token_ids=True)
    (choice,) = stopped["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["stop_reason"] == ord("c")  # the token counts and is returned, its text is not
    assert choice["token_ids"] == [*b"abc"] and stopped["usage"]["completion_tokens"] == 3
    shown = ask(client, "abcd", stop_token_ids=[ord("c")], include_stop_str_in_output=True)
    assert shown["choices"][0]["message"]["content"] == "abc"


def test_special_tokens_can_be_shown(client: TestClient) -> None:
    shown = ask(client, "ab", ignore_eos=True, max_tokens=5, skip_special_tokens=False)
    assert shown["choices"][0]["message"]["content"] == "ab<|im_end|>ab"
    ended = ask(client, "ab", skip_special_tokens=False)
    assert ended["choices"][0]["message"]["content"] == "ab"
    both = ask(client, "ab", skip_special_tokens=False, include_stop_str_in_output=True)
    assert both["choices"][0]["message"]["content"] == "ab<|im_end|>"


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("offset", range(7))
def test_text_tokens_logprobs_and_usage_agree_at_a_stop_string(client: TestClient, offset: int, kept: bool) -> None:
    """The string ends at every place of a block, and begins in the one before."""
    fields = {"stop": ["STOP"], "logprobs": True, "return_token_ids": True, "include_stop_str_in_output": kept}
    text = "a" * offset + "STOP"
    answer = ask(client, text + "more of it", **fields)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == (text if kept else "a" * offset)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")
    assert choice["token_ids"] == [*text.encode()]
    assert [entry["bytes"][0] for entry in choice["logprobs"]["content"]] == [*text.encode()]
    assert answer["usage"]["completion_tokens"] == len(text)
    assert answer["prompt_token_ids"][0] == 257

    request = {**fields, "stream_options": {"include_usage": True}}
    parsed = events(client, CHAT, body(text + "more of it", **request))
    assert parsed[-1]["usage"] == answer["usage"]
    assert collected(parsed, 0, "token_ids") == choice["token_ids"]
    entries = [event["choices"][0]["logprobs"] for event in parsed[:-1]]
    assert [entry for piece in entries if piece for entry in piece["content"]] == choice["logprobs"]["content"]
    assert parsed[0]["prompt_token_ids"] == answer["prompt_token_ids"] and "prompt_token_ids" not in parsed[1]


def test_min_tokens_come_before_a_stop_string(client: TestClient) -> None:
    answer = ask(client, "a|b|c", stop="|", min_tokens=2)
    assert answer["choices"][0]["message"]["content"] == "a|b"
    assert answer["usage"]["completion_tokens"] == 4


def test_stop_string_that_is_the_answers_beginning_or_twice_there(client: TestClient) -> None:
    assert ask(client, "hello", stop=["hel", "hel"])["choices"][0]["message"]["content"] == ""
    assert ask(client, "hello", stop=["", "x"][1:])["choices"][0]["message"]["content"] == "hello"
    assert ask(client, "mit 漢字🙂 end", stop="字🙂")["choices"][0]["message"]["content"] == "mit 漢"


def test_top_logprobs(client: TestClient) -> None:
    assert ask(client)["choices"][0]["logprobs"] is None
    content = ask(client, "ab", logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b", "<|im_end|>"]
    assert content[0]["logprob"] == -0.097 and content[0]["bytes"] == [97]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "0"]
    assert content[2]["logprob"] == -9999.0
    assert all(entry["top_logprobs"] == [] for entry in ask(client, logprobs=True)["choices"][0]["logprobs"]["content"])


def test_final_message_is_continued(client: TestClient, engine: EchoEngine) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, <|im_end|>"}]
    ask(client, messages=messages, continue_final_message=True)
    ask(client, messages=messages, add_generation_prompt=False)
    continued, closed = engine.prompts
    assert bytes(continued[-10:]) == b"<|im_end|>" and continued.count(END) == 1
    assert closed[-2] == END and closed.count(END) == 2


def test_usage_goes_along_with_every_event(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    parsed = streamed(client, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in parsed]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == counts[-2] == len("hello there") + 1


@pytest.mark.parametrize("n", [1, 2])
def test_speculative_metrics_add_up(client: TestClient, n: int) -> None:
    assert "metrics" not in ask(client)
    answer = ask(client, n=n, return_speculative_metrics=True)
    figures, usage = answer["metrics"]["speculative_decoding"], answer["usage"]["completion_tokens_details"]
    histogram = figures["acceptance_histogram"]
    assert len(histogram) == NUM_SLOTS + 1 and figures["num_spec_tokens"] == NUM_SLOTS
    assert sum(histogram) == figures["num_spec_steps"] == n * 3
    accepted = sum(count * blocks for count, blocks in enumerate(histogram))
    assert accepted == figures["num_accepted_draft_tokens"] == usage["accepted_prediction_tokens"]
    assert figures["num_draft_tokens"] - accepted == usage["rejected_prediction_tokens"]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / figures["num_spec_steps"])
    assert figures["draft_acceptance_rate"] == pytest.approx(accepted / figures["num_draft_tokens"])
    parsed = streamed(client, n=n, return_speculative_metrics=True)
    assert parsed[-1]["metrics"] == answer["metrics"]
    assert not any("metrics" in event for event in parsed[:-1])
    parsed = streamed(client, n=n, return_speculative_metrics=True, stream_options={"include_usage": True})
    assert parsed[-1]["metrics"] == answer["metrics"] and parsed[-1]["choices"] == []


def test_answer_of_one_token_has_no_block(client: TestClient) -> None:
    figures = ask(client, max_tokens=1, return_speculative_metrics=True)["metrics"]["speculative_decoding"]
    assert (figures["num_spec_steps"], figures["mean_acceptance_length"], figures["draft_acceptance_rate"]) == (0, 1, 0)
