"""An engine that answers with the user's own words, and the endpoint over it on a port of its own."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.types import ASGIApp
from transformers import PreTrainedTokenizerFast

from lilicorr.decode import SamplingParams
from lilicorr.engine.counters import Counters
from lilicorr.engine.pages import PagePool
from lilicorr.engine.request import Request, TokenChunk
from lilicorr.logprobs import TokenLogprobs
from lilicorr.tiny import byte_tokenizer
from serve_app.api import build_api
from serve_app.detokenize import token_table
from serve_app.guard import Limits
from serve_app.replica import Replica
from serve_app.served_model import ServedModel

UNICODE = "ď 똻 👩‍👩‍👧 🙂🙂 漢字"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
START, END = 257, 258  # <|im_start|>, <|im_end|>
MAX_MODEL_LEN = 4096
NUM_SLOTS = 5  # the fake drafts so many and has the first `block - 1` accepted


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, ChatML, and two added tokens that are text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "<a b>"])
    return tokenizer


@dataclass
class _Echo:
    request: Request
    answer: list[int]
    num_sent: int = 0

    @property
    def num_to_prefill(self) -> int:
        return len(self.request.prompt_ids)


class EchoEngine:
    """Answers with the last user message, or with a prompt that is no chat, one byte per token, `block` tokens per
    block; then the end token. Where that does not end the answer it starts again.

    A message BOOM fails, DIE breaks the device, NEVER is refused by `check`, LATE by `submit` alone. `pace_s` is how
    long a step takes. It has the attributes of the engine that a snapshot reads.
    """

    def __init__(self, block: int = 4, pace_s: float = 0.0, max_running: int = 2) -> None:
        self.block, self.pace_s, self.max_running = block, pace_s, max_running
        self.requests: list[Request] = []  # submitted ones
        self.num_open = 0  # with a row
        self.counters = Counters(accepted_at=max(NUM_SLOTS, block - 1) * [0])
        self.pool = PagePool(10)
        rows: list[_Echo] = []  # all of them decode
        self.scheduler = SimpleNamespace(
            running=rows, decoding=rows, waiting=[], num_preemptions=0, num_cached_tokens=0
        )

    @property
    def params(self) -> list[SamplingParams]:
        return [request.params for request in self.requests]

    @property
    def prompts(self) -> list[list[int]]:
        return [request.prompt_ids for request in self.requests]

    @property
    def num_blocks(self) -> int:
        return self.counters.num_blocks

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check(self, request: Request) -> None:
        if _last_user_message(request.prompt_ids) == list(b"NEVER"):
            raise ValueError("this request is impossible")

    def submit(self, request: Request) -> None:
        self.check(request)
        message = _last_user_message(request.prompt_ids)
        if message == list(b"LATE"):
            raise ValueError("this request came too late")
        self.requests.append(request)
        answer = []
        for token_id in itertools.islice(itertools.cycle([*message, END]), request.params.max_new_tokens):
            answer.append(token_id)
            if token_id in request.params.stop_ids:
                break
        self.scheduler.waiting.append(_Echo(request, answer))

    def abort(self, request_id: str) -> None:
        for place in (self.scheduler.running, self.scheduler.waiting):
            place[:] = [echo for echo in place if echo.request.id != request_id]
        self.num_open = len(self.scheduler.running)

    def step(self) -> list[TokenChunk]:
        scheduler = self.scheduler
        while scheduler.waiting and len(scheduler.running) < self.max_running:
            scheduler.running.append(scheduler.waiting.pop(0))
        self.num_open = len(scheduler.running)
        time.sleep(self.pace_s)
        self.counters.num_steps += 1
        chunks = [self._advance(echo) for echo in scheduler.running]
        for chunk in chunks:
            if chunk.last:
                self.abort(chunk.request_id)
        return chunks

    def _advance(self, echo: _Echo) -> TokenChunk:
        """The first token, then block by block; all drafts but the last token of a block were accepted."""
        request_id = echo.request.id
        if echo.answer[:4] == list(b"BOOM"):
            return TokenChunk(request_id, [], error="ValueError: this request is cursed")
        if echo.answer[:3] == list(b"DIE"):
            raise torch.AcceleratorError("the device is gone")
        first = echo.num_sent == 0
        token_ids = echo.answer[echo.num_sent :][: 1 if first else self.block]
        echo.num_sent += len(token_ids)
        num_accepted = 0 if first else min(self.block - 1, len(token_ids))
        self.counters.num_tokens += len(token_ids)
        if not first:
            self.counters.num_blocks += 1
            self.counters.num_block_tokens += len(token_ids)
            for slot in range(num_accepted):
                self.counters.accepted_at[slot] += 1
        reason, params = None, echo.request.params
        if echo.num_sent == len(echo.answer):
            reason = "stop" if echo.answer and echo.answer[-1] in params.stop_ids else "length"
        num_drafted = 0 if first else len(self.counters.accepted_at)
        self.counters.num_drafted += num_drafted
        logprobs = prompt_logprobs = None
        if params.num_logprobs is not None:
            logprobs = [token_logprobs(token_id, params.num_logprobs) for token_id in token_ids]
        if first and echo.request.num_prompt_logprobs is not None:
            count = echo.request.num_prompt_logprobs
            prompt_logprobs = [None, *(token_logprobs(token_id, count) for token_id in echo.request.prompt_ids[1:])]
        return TokenChunk(
            request_id, token_ids, num_drafted, num_accepted, reason, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )


def token_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """Made up: the token is the likeliest one, "0", "1", ... come next; the end token cannot be."""
    logprob = float("-inf") if token_id == END else -token_id / 1000
    return TokenLogprobs(token_id, logprob, [(token_id, logprob), *((48 + i, -5.0 - i) for i in range(20))][:count])


def _last_user_message(prompt_ids: list[int]) -> list[int]:
    starts = [i for i, token_id in enumerate(prompt_ids) if token_id == START]
    if len(starts) < 2:
        return prompt_ids
    begin = starts[-2] + len("user\n") + 1
    return prompt_ids[begin : prompt_ids.index(END, begin)]


def make_app(
    engine: EchoEngine, max_requests: int = 8, stall_s: float = 60.0, limits: Limits | None = None
) -> tuple[FastAPI, Replica]:
    """The API over `engine`; close the replica afterwards."""
    replica = Replica(engine, max_requests, stall_s)
    return build_api(echo_model(), replica, limits), replica


def echo_model() -> ServedModel:
    """What the API knows of a model that echoes."""
    tokenizer = chat_tokenizer()
    return ServedModel(
        name="echo",
        tokenizer=tokenizer,
        token_table=token_table(tokenizer),
        spelled_table=token_table(tokenizer, special=True),
        template_kwargs={"enable_thinking": False},
        stop_ids=(tokenizer.eos_token_id,),
        num_rows=len(tokenizer) + 3,
        num_slots=NUM_SLOTS,
        max_model_len=MAX_MODEL_LEN,
        fingerprint="0123",
        created=1_700_000_000,
    )


@contextmanager
def listening(app: ASGIApp) -> Iterator[str]:
    """Serve `app` on a free port of 127.0.0.1; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Poll until `condition` holds; AssertionError after the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def body(text: Any = "hello there", **fields: Any) -> dict[str, Any]:
    """A request of one user message."""
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **fields}


def ask(client: TestClient, text: Any = "hello there", **fields: Any) -> dict[str, Any]:
    """The response to a chat request."""
    response = client.post(CHAT, json=body(text, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def complete(client: TestClient, prompt: Any, **fields: Any) -> dict[str, Any]:
    """The response to a completion request."""
    response = client.post(COMPLETIONS, json={"model": "echo", "prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events(client: TestClient, path: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The parsed events of a streamed answer."""
    response = client.post(path, json={**request, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def refused(client: TestClient, status: int = 400, path: str = CHAT, **request: Any) -> dict[str, Any]:
    """The error of a request that is refused with `status`."""
    response = client.post(path, **request)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return error
