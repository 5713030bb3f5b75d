"""A decoder that answers with the user's own words, and the endpoint over it on a port of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from transformers import PreTrainedTokenizerFast

from lilicorr.blocks import Proposal, Verdict
from lilicorr.decode import SamplingParams
from lilicorr.tiny import byte_tokenizer
from serve_app.api import ServedModel, build_api
from serve_app.detokenize import token_table
from serve_app.replica import ReferenceEngine, Replica

UNICODE = "ď 똻 👩‍👩‍👧 🙂🙂 漢字"
CHAT = "/v1/chat/completions"
MAX_MODEL_LEN = 4096
NUM_SLOTS = 5  # the fake drafts so many and has the first `block - 1` accepted


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, ChatML, and two added tokens that are text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "<a b>"])
    return tokenizer


class EchoDecoder:
    """Answers with the last user message, one byte per token, `block` tokens per block; then the end token.

    A message BOOM fails, DIE breaks the device. `pace_s` is how long a block takes.
    """

    def __init__(self, block: int = 4, pace_s: float = 0.0) -> None:
        self.block, self.pace_s = block, pace_s
        self.params: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.num_blocks = 0
        self.num_open = 0

    def stream(
        self, prompt_ids: list[int], params: SamplingParams, observe: Callable[[Any, Proposal, Verdict], None]
    ) -> Iterator[list[int]]:
        """As `lilicorr.decode.Decoder.stream`."""
        self.params.append(params)
        self.prompts.append(prompt_ids)
        message = _last_user_message(prompt_ids)
        if message == list(b"BOOM"):
            raise ValueError("this request is cursed")
        if message == list(b"DIE"):
            raise torch.AcceleratorError("the device is gone")
        answer = [*message, *params.stop_ids][: params.max_new_tokens]
        self.num_open += 1
        try:
            yield answer[:1]
            for begin in range(1, len(answer), self.block):
                time.sleep(self.pace_s)
                self.num_blocks += 1
                drafts = torch.zeros(1, NUM_SLOTS, dtype=torch.int64)
                observe(None, Proposal(drafts), Verdict(torch.tensor([self.block - 1]), torch.tensor([0])))
                yield answer[begin : begin + self.block]
        finally:
            self.num_open -= 1


def _last_user_message(prompt_ids: list[int]) -> list[int]:
    start, end = 257, 258
    begin = [i for i, token_id in enumerate(prompt_ids) if token_id == start][-2] + len("user\n") + 1
    return prompt_ids[begin : prompt_ids.index(end, begin)]


def make_app(
    decoder: Any, max_running: int = 2, max_requests: int = 8, stall_s: float = 60.0
) -> tuple[FastAPI, Replica]:
    """The API over `decoder`; close the replica afterwards."""
    tokenizer = chat_tokenizer()
    replica = Replica(ReferenceEngine(decoder, max_running), max_requests, stall_s)
    model = ServedModel(
        name="echo",
        tokenizer=tokenizer,
        token_table=token_table(tokenizer),
        template_kwargs={"enable_thinking": False},
        stop_ids=(tokenizer.eos_token_id,),
        max_model_len=MAX_MODEL_LEN,
        fingerprint="0123",
        created=1_700_000_000,
    )
    return build_api(model, replica), replica


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
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


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Poll until `condition` holds; AssertionError after the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def body(text: Any = "hello there", **fields: Any) -> dict[str, Any]:
    """A request of one user message."""
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **fields}


def refused(client: TestClient, status: int = 400, **request: Any) -> dict[str, Any]:
    """The error of a request that is refused with `status`."""
    response = client.post(CHAT, **request)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return error
