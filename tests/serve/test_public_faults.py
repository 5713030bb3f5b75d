"""Faults that users of other servers have reported, each tried on this endpoint over HTTP where HTTP can show it.

What was reported, and the tests that would fail here; those without a file are in this one.

    a stop string early in an accepted block is missed           (sglang#23802, #27637)
        test_a_stop_string_within_drafts_that_are_all_right
        test_served_model: test_stop_string_within_accepted_drafts
    the text ends at the stop string, ids and logprobs do not    (vllm#47616)
        test_a_stop_string_within_drafts_that_are_all_right
        test_fields: test_text_tokens_logprobs_and_usage_agree_at_a_stop_string
    a stop string counts only at the end of a block              (transformers#48039)
        test_a_stop_string_within_drafts_that_are_all_right
        test_detokenize: test_stop_string_at_every_offset_of_a_block
    greedy and sampled rows of a batch, NaN, falling counters    (vllm#27077)
        test_long_answers_that_take_each_others_pages
        test_served_model: test_answers_are_those_of_the_reference_all_at_once
    a seed is ignored, or depends on batch and preemption        (vllm#6038, #52522, TensorRT-LLM#17599)
        test_long_answers_that_take_each_others_pages
        test_exact: test_seeded_requests_draw_the_same_tokens_in_any_company
    requests without a seed share one stream of draws            (TensorRT-LLM#19487)
        test_unseeded_requests_do_not_share_their_draws
    no prefix hits with a drafter                                (z-lab/dflash#165, vllm#50457)
        test_prefix_hits_are_counted_beside_drafts
        test_served_model: test_one_prompt_many_times_has_one_answer
    keys and values are wrong behind a refused draft             (vllm#9730, openvino.genai#4190)
    the first draft is committed unverified                      (lattice#243)
        test_drafts_wrong_at_one_slot_cost_tokens_and_no_answer
        test_exact: test_drafts_that_are_wrong_at_one_slot
    greedy answers differ from those without drafts              (vllm#54928, transformers#39421)
        test_exact: test_200_mixed_requests
        test_engine: test_deterministic_answers_have_the_same_bits_in_any_company
    wrong answers under concurrency, missing batch sizes         (sglang#35150, FreeToken#173)
        test_one_prompt_64_times_has_one_answer
        test_step: test_batch_sizes
    blocks without drafts are reported as refused drafts         (vllm#34751)
        test_blocks_without_drafts_are_no_drafts
        test_served_model: test_answer_of_one_token_drafts_nothing
    a preempted request gets what was in flight                  (vllm#49620)
        test_long_answers_that_take_each_others_pages
    penalties and min_tokens count a block as one token          (sglang#33643, vllm#33251, TensorRT-LLM#17701)
        test_served_model: test_processed_answers_are_those_of_the_reference
        test_sampling: test_all_settings_in_any_company
    a grammar is not applied within a block                      (vllm#36138, #15554): refused
        test_protocol: test_bad_field_is_named
    U+FFFD where a character spans tokens or blocks              (exo#1691, dynamo#12688)
        test_api: test_unicode_streams_whole_characters, test_cut_inside_a_character_drops_it
        test_detokenize: test_one_byte_per_token_gives_whole_characters
    an over-long prompt is a 500, an empty answer, or no answer  (llama.cpp#19774)
        test_a_prompt_that_leaves_no_room_is_a_400_with_both_numbers
    leaving does not free the row                                (FreeToken#173)
        test_served_model: test_leaving_client_frees_its_row
    out of bounds after some thousand sampled steps              (vllm#55279)
        test_soak: test_a_long_run_keeps_nothing
    streaming through Serve costs time; replicas never go        (ray#59681, #52745, #61551)
        test_load: test_load
        test_scaling_cluster: test_load_raises_replicas_quiet_lowers_them_and_streams_drain
    short prompts degrade                                        (vllm#41262)
        test_served_model: test_short_prompts
        test_exact: test_one_request_drafts_what_the_reference_drafts

Nobody reported these: many requests in one tick, a replica that ends under open streams (here), a request that ends and
is aborted in one step (test_engine: test_a_request_that_ends_and_is_aborted_in_the_same_step), stop strings that are
the answer's beginning or stand there twice (test_fields:
test_stop_string_that_is_the_answers_beginning_or_twice_there), several answers with and without a seed (test_fields:
test_choices_have_seeds_of_their_own, test_served_model: test_seeds_make_answers). Where speculation is slower than
autoregression is a matter of measurement: `benches/decode.py`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fakes import (
    CHAT,
    COMPLETIONS,
    MAX_MODEL_LEN,
    EchoEngine,
    body,
    complete,
    events,
    listening,
    make_app,
    refused,
    wait_until,
)
from fastapi.testclient import TestClient
from models import DRAFTER
from scripted import Served, always, mostly, scripted_endpoint
from test_metrics import assert_none_fell, total

from lilicorr.config import EngineConfig
from lilicorr.decode import Decoder, SamplingParams

SLOTS, ROWS, QUEUE = 15, 8, 24
PAGES = 16  # eight answers of 130 tokens need 24
ANSWER = 200


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Blocks of 16, a step in flight while the host reads the one before, and autoregression as the reference."""
    config = EngineConfig(max_running=ROWS, num_pages=PAGES, steps_behind=1)
    drafter = replace(DRAFTER, block_size=SLOTS + 1)
    with scripted_endpoint(tmp_path_factory.mktemp("models"), config, QUEUE, drafter) as served:
        yield replace(served, decoder=Decoder(served.decoder.target, None))


@pytest.fixture
def served(endpoint: Served) -> Served:
    """The endpoint with drafts that are right where a text is known, and none known."""
    endpoint.head.texts.clear()
    endpoint.head.right, endpoint.head.num_drafts = always, None
    return endpoint


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, timeout=250) as client:
        yield client


def tiny(**fields: Any) -> dict[str, Any]:
    """Fields of a request for an answer that its limit alone ends."""
    return {"model": "tiny", "ignore_eos": True, "return_token_ids": True, **fields}


def metrics(http: httpx2.Client) -> str:
    return http.get("/metrics").text


@pytest.mark.parametrize("offset", [0, 1, 7, 14, 15])
def test_a_stop_string_within_drafts_that_are_all_right(served: Served, http: httpx2.Client, offset: int) -> None:
    """It is complete with this token of the second block, whose tokens are all there at once; letters alone are drawn,
    and the string is as short as one can be that does not stand there before."""
    letters = {str(token_id): 100 for token_id in range(97, 123)}
    params = SamplingParams(48, 1.0, seed=50, logit_bias=tuple((int(key), 100.0) for key in letters))
    text, _ = served.text([*b"stop"], params)
    assert text.isalpha() and len(text) == 48
    end = 2 + SLOTS + 1 + offset  # the prefill's token, the first block, and of the second one the token at `offset`
    stop = next(text[begin:end] for begin in range(end - 2, -1, -1) if text.index(text[begin:end]) == begin)
    fields = tiny(max_tokens=48, seed=50, logit_bias=letters, stop=stop, logprobs=0)
    answer = complete(http, "stop", return_speculative_metrics=True, **fields)
    (choice,) = answer["choices"]
    assert choice["text"] == text[: end - len(stop)] and choice["stop_reason"] == stop
    assert bytes(choice["token_ids"]).decode() == "".join(choice["logprobs"]["tokens"]) == text[:end]
    assert answer["usage"]["completion_tokens"] == end
    figures = answer["metrics"]["speculative_decoding"]
    assert figures["num_spec_steps"] == 2
    assert figures["num_accepted_draft_tokens"] == SLOTS + min(SLOTS, offset + 1)
    parsed = events(http, COMPLETIONS, {"prompt": "stop", **fields, "stream_options": {"include_usage": True}})
    assert "".join(one["text"] for event in parsed for one in event["choices"]) == choice["text"]
    assert parsed[-1]["usage"] | {"prompt_tokens_details": None} == answer["usage"] | {"prompt_tokens_details": None}


def test_drafts_wrong_at_one_slot_cost_tokens_and_no_answer(served: Served, http: httpx2.Client) -> None:
    """Fifteen requests side by side, each wrong at a slot of its own and right elsewhere, for 200 tokens."""
    prompt, slots = [*b"wrong somewhere"], range(1, SLOTS + 1)
    expected = served.decoder.generate(prompt, SamplingParams(ANSWER)).token_ids
    served.head.texts |= dict.fromkeys(slots, prompt + expected)
    # blocks of `seed` tokens follow the first token, and their last one is not the draft
    served.head.right = lambda seed, position: (position - len(prompt) - 1) % seed != seed - 1

    def ask(slot: int) -> dict[str, Any]:
        fields = tiny(max_tokens=ANSWER, temperature=0, seed=slot, return_speculative_metrics=True)
        return complete(http, prompt, **fields)

    with ThreadPoolExecutor(SLOTS) as pool:
        answers = dict(zip(slots, pool.map(ask, slots)))
    for slot, answer in answers.items():
        assert answer["choices"][0]["token_ids"] == expected, slot
        whole, rest = divmod(ANSWER - 1, slot)
        histogram = [whole * (count == slot - 1) + (0 < rest == count) for count in range(SLOTS + 1)]
        assert answer["metrics"]["speculative_decoding"]["acceptance_histogram"] == histogram, slot
    assert answers[1]["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 1.0


SETTINGS = [
    SamplingParams(130, seed=60),
    SamplingParams(130, 1e-6, seed=61),
    SamplingParams(130, 1.0, seed=62),
    SamplingParams(130, 1.0, 20, 0.9, seed=63),
]


def test_long_answers_that_take_each_others_pages(served: Served, http: httpx2.Client) -> None:
    """Greedy, nearly greedy and sampled, each twice at once, more than the pages hold; and then each alone."""
    prompt, before = [*b"a long one"], metrics(http)
    expected = {params.seed: served.decoder.generate(prompt, params).token_ids for params in SETTINGS}
    assert expected[60] == expected[61] and expected[62] != expected[60]
    served.head.texts |= {seed: prompt + token_ids for seed, token_ids in expected.items()}
    served.head.right = mostly

    def ask(params: SamplingParams) -> list[int]:
        sampling = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        fields = tiny(max_tokens=params.max_new_tokens, seed=params.seed, **sampling)
        return complete(http, prompt, **fields)["choices"][0]["token_ids"]

    with ThreadPoolExecutor(ROWS) as pool:
        answers = list(pool.map(ask, SETTINGS * 2))
    for params, answer in zip(SETTINGS * 2, answers, strict=True):
        assert answer == expected[params.seed], params
    wait_until(lambda: total(metrics(http), "lilicorr:pages_free") == PAGES)
    after = metrics(http)
    assert_none_fell(before, after)
    assert total(after, "vllm:num_preemptions_total") > total(before, "vllm:num_preemptions_total")
    assert [ask(params) for params in SETTINGS] == list(expected.values())
    assert total(metrics(http), "vllm:num_preemptions_total") == total(after, "vllm:num_preemptions_total")


def test_unseeded_requests_do_not_share_their_draws(http: httpx2.Client) -> None:
    """Twenty in a row: none is another one, also not from a later token on."""
    answers = [complete(http, "by chance", **tiny(max_tokens=16))["choices"][0]["token_ids"] for _ in range(20)]
    for one, other in itertools.permutations(answers, 2):
        for shift in range(5):
            assert one[shift:] != other[: 16 - shift], shift


def test_prefix_hits_are_counted_beside_drafts(http: httpx2.Client) -> None:
    hits, found = "vllm:prefix_cache_hits_total", []
    for _ in range(2):
        before = total(metrics(http), hits)
        answer = complete(http, "said before " * 11, **tiny(max_tokens=16))
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert answer["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0
        assert total(metrics(http), hits) - before == found[-1]
    assert found == [0, 128]


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_one_prompt_64_times_has_one_answer(served: Served, http: httpx2.Client, concurrency: int) -> None:
    text, _ = served.text([*b"hi"], SamplingParams(20, seed=70))
    served.head.right = mostly
    with ThreadPoolExecutor(concurrency) as pool:
        asked = [pool.submit(complete, http, "hi", **tiny(max_tokens=20, temperature=0, seed=70)) for _ in range(64)]
        assert {future.result()["choices"][0]["text"] for future in asked} == {text}


def test_blocks_without_drafts_are_no_drafts(served: Served, http: httpx2.Client) -> None:
    text, _ = served.text([*b"none"], SamplingParams(12, seed=80))
    served.head.num_drafts = lambda _seed: 0
    drafts, blocks = "vllm:spec_decode_num_drafts_total", "lilicorr:blocks_total"
    before = metrics(http)
    fields = tiny(max_tokens=12, temperature=0, seed=80, return_speculative_metrics=True)
    answer = complete(http, "none", **fields)
    assert answer["choices"][0]["text"] == text
    figures = answer["metrics"]["speculative_decoding"]
    assert figures["num_spec_steps"] == figures["num_draft_tokens"] == figures["draft_acceptance_rate"] == 0
    wait_until(lambda: total(metrics(http), blocks) == total(before, blocks) + 11)
    assert total(metrics(http), drafts) == total(before, drafts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_that_leaves_no_room_is_a_400_with_both_numbers(
    client: TestClient, engine: EchoEngine, path: str, length: int, stream: bool
) -> None:
    request: dict[str, Any] = {"model": "echo", "prompt": [120] * length}
    if path == CHAT:
        empty = client.post("/tokenize", json={"messages": [{"role": "user", "content": ""}]}).json()["count"]
        request = body("x" * (length - empty))
    error = refused(client, path=path, json=request | {"stream": stream})
    assert error["code"] == "context_length_exceeded"
    assert re.findall(r"\d+", error["message"]) == [str(MAX_MODEL_LEN), str(length)]
    assert not engine.requests


def test_32_prompts_that_come_in_one_tick(served: Served, http: httpx2.Client) -> None:
    prompts = [[number, 7, 9] for number in range(ROWS + QUEUE)]
    expected = [served.decoder.generate(prompt, SamplingParams(6)).token_ids for prompt in prompts]
    answer = complete(http, prompts, **tiny(max_tokens=6, temperature=0))
    assert [choice["token_ids"] for choice in answer["choices"]] == expected


def test_streams_of_a_replica_that_ends_are_told() -> None:
    app, replica = make_app(EchoEngine(pace_s=0.02))
    request = body("z" * 2000, stream=True)
    with listening(app) as url, httpx2.stream("POST", url + CHAT, json=request, timeout=60) as response:
        lines = filter(None, response.iter_lines())
        while "zzzz" not in next(lines):
            pass
        replica.close()
        *_, error, done = lines
    assert done == "data: [DONE]"
    assert "the replica was closed" in json.loads(error.removeprefix("data: "))["error"]["message"]


def test_the_tests_named_above_exist() -> None:
    here, found = Path(__file__).stem, set()
    for line in __doc__.split("\nNobody reported")[0].splitlines():
        if match := re.fullmatch(r" {8}(?:(test_\w+): )?(test_.+)", line):
            found |= {(match[1] or here, name) for name in match[2].split(", ")}
    spread = " ".join(__doc__.split("\nNobody reported")[1].split())
    found |= set(re.findall(r"(test_\w+): (test_\w+)", spread))
    sources = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert len(found) > 30
    for module, name in found:
        assert f"def {name}(" in sources[module], f"{module} has no {name}"
