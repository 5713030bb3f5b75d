"""Programs that people use talk to the endpoint over the real engine, each as its own documentation says.

`make test-clients` installs them in an environment of their own. What they are given is held against decode.py.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from fakes import CHAT, listening, wait_until
from models import load, save_random_checkpoint
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lilicorr.chat import render_prompt
from lilicorr.checkpoint import load_draft_model
from lilicorr.config import EngineConfig
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.engine.engine import Engine
from lilicorr.tiny import tiny_target_folder
from serve_app.api import build_api
from serve_app.args import AppArgs
from serve_app.detokenize import TextStream
from serve_app.openapi import POSTS, document
from serve_app.replica import Replica
from serve_app.served_model import served_model

pytestmark = [pytest.mark.slow]
QUESTION = "What is 1 + 1?"
ROWS, QUEUE = 4, 4
LOCUSTFILE = '''
from locust import HttpUser, task


class Reader(HttpUser):
    """Reads streamed answers to their end."""

    @task
    def chat(self):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "stream": True}
        options = {"stream": True, "timeout": 60, "catch_response": True}
        with self.client.post("/v1/chat/completions", json=body, **options) as answer:
            lines = [line for line in answer.iter_lines() if line]
            if lines and lines[-1] == b"data: [DONE]":
                answer.success()
            else:
                answer.failure(f"the stream ended with {lines[-1:]}")
'''


@dataclass
class Endpoint:
    """A running endpoint, the folder of its tokenizer, and the reference decoder of the same weights."""

    url: str
    target: Path
    replica: Replica
    decoder: Decoder
    model: Any
    answered: list[tuple[str, str, int]]  # method, path, status

    def answer(self, question: str = QUESTION, max_tokens: int = 20) -> str:
        """What decode.py says to one user message, greedily."""
        prompt_ids = render_prompt(self.model.tokenizer, [{"role": "user", "content": question}], {})
        token_ids = self.decoder.generate(prompt_ids, SamplingParams(max_tokens, stop_ids=(258,))).token_ids
        stream = TextStream(self.model.token_table)
        return stream.push(token_ids).text + stream.finish()


class Watched:
    """An application that notes method, path and status of every answer."""

    def __init__(self, app: ASGIApp, answered: list[tuple[str, str, int]]) -> None:
        self._app, self._answered = app, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered.append((scope["method"], scope["path"], message["status"]))
            await send(message)

        await self._app(scope, receive, noted)


@contextmanager
def serving_tiny(folder: Path, config: EngineConfig) -> Iterator[Endpoint]:
    """A random target and draft model behind the API, on a port."""
    target = tiny_target_folder(folder / "target")
    save_random_checkpoint(folder / "checkpoint", target, seed=0)
    args = AppArgs(checkpoint=str(folder / "checkpoint"), target=str(target), model_name="tiny", max_queue=QUEUE)
    reference, loaded = load(target), load(target)
    decoder = Decoder(reference, load_draft_model(folder / "checkpoint", reference))
    engine = Engine(loaded, load_draft_model(folder / "checkpoint", loaded), config)
    model, replica = served_model(args, engine), Replica(engine, config.max_running + QUEUE, args.stall_s)
    answered: list[tuple[str, str, int]] = []
    with listening(Watched(build_api(model, replica), answered)) as url:
        yield Endpoint(url, target, replica, decoder, model, answered)
    replica.close()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with serving_tiny(tmp_path_factory.mktemp("models"), EngineConfig(max_running=ROWS)) as endpoint:
        yield endpoint


def run(command: list[str], variables: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A client's command to its end; one that fails shows what it said."""
    result = subprocess.run(
        command, env={**os.environ, **variables}, cwd=folder, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result


def needs(package: str) -> None:
    """Skip the test where a client is not installed, without importing it."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def program(name: str) -> str:
    """A command of this environment."""
    return str(Path(sys.executable).with_name(name))


def test_openai_sdk_retries_until_there_is_room(endpoint: Endpoint) -> None:
    """Streams that nobody reads fill rows and queue; the refused request waits as Retry-After says and succeeds."""
    statuses: list[int] = []
    hooks = {"response": [lambda response: statuses.append(response.status_code)]}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "ignore_eos": True}
    held = [httpx2.Client(timeout=100) for _ in range(ROWS + QUEUE)]
    streams = [client.stream("POST", endpoint.url + CHAT, json=body | {"stream": True}) for client in held]
    try:
        threads = [threading.Thread(target=stream.__enter__) for stream in streams]
        for thread in threads:
            thread.start()
        wait_until(lambda: endpoint.replica.num_requests == ROWS + QUEUE)
        http = openai.DefaultHttpxClient(event_hooks=hooks)
        sdk = openai.OpenAI(base_url=endpoint.url + "/v1", api_key="none", max_retries=8, http_client=http)
        messages = [{"role": "user", "content": QUESTION}]
        done: list[Any] = []

        def ask() -> None:
            done.append(sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=20, temperature=0))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: 429 in statuses)
    finally:
        for client in held:
            client.close()
    asking.join(timeout=100)
    assert done[0].choices[0].message.content == endpoint.answer()
    assert statuses[0] == 429 and statuses[-1] == 200


def test_langchain(endpoint: Endpoint) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        base_url=endpoint.url + "/v1", api_key="none", model="tiny", temperature=0, max_tokens=20
    )
    assert chat.invoke(QUESTION).content == endpoint.answer()
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == endpoint.answer()
    assert asyncio.run(chat.ainvoke(QUESTION)).content == endpoint.answer()


def test_instructor_is_told_what_is_not_supported(endpoint: Endpoint) -> None:
    """It forces a tool call by default; an answer without one would only be asked for again and again."""
    instructor = pytest.importorskip("instructor")
    from pydantic import BaseModel

    class Sum(BaseModel):
        value: int

    client = instructor.from_openai(openai.OpenAI(base_url=endpoint.url + "/v1", api_key="none", max_retries=0))
    with pytest.raises(Exception, match="tools"):
        client.chat.completions.create(
            model="tiny", response_model=Sum, max_retries=1, messages=[{"role": "user", "content": QUESTION}]
        )


@pytest.mark.parametrize("stream", [True, False])
def test_llm(endpoint: Endpoint, tmp_path: Path, stream: bool) -> None:
    needs("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: tiny\n  model_name: tiny\n  api_base: {endpoint.url}/v1\n", encoding="utf-8"
    )
    options = ["-m", "tiny", "--key", "none", "-o", "temperature", "0", "-o", "max_tokens", "20"]
    command = [program("llm"), QUESTION, *options, *([] if stream else ["--no-stream"])]
    told = run(command, {"LLM_USER_PATH": str(tmp_path), "PYTHONIOENCODING": "utf-8"}, tmp_path).stdout
    assert told == endpoint.answer() + "\n"


def test_litellm(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    more = {"api_base": endpoint.url + "/v1", "api_key": "none", "temperature": 0, "max_tokens": 20}
    messages = [{"role": "user", "content": QUESTION}]
    whole = litellm.completion(model="hosted_vllm/tiny", messages=messages, **more)
    assert whole.choices[0].message.content == endpoint.answer()
    pieces = litellm.completion(model="hosted_vllm/tiny", messages=messages, stream=True, **more)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == endpoint.answer()


def test_curl(endpoint: Endpoint, tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20, "temperature": 0}
    command = ["curl", "-sN", endpoint.url + CHAT, "-H", "Content-Type: application/json", "-d"]
    lines = run([*command, json.dumps(body | {"stream": True})], {}, tmp_path).stdout.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == endpoint.answer()


def lm_eval(endpoint: Endpoint, folder: Path, task: str, model: str, route: str, *options: str) -> dict[str, Any]:
    """Run one local task and return lm-eval's results and samples."""
    (folder / "task.yaml").write_text(task, encoding="utf-8")
    settings = f"model=tiny,base_url={endpoint.url}{route},num_concurrent=2,max_retries=1,tokenizer={endpoint.target}"
    command = [program("lm_eval"), "run", "--model", model, "--model_args", settings, "--include_path", str(folder)]
    command += ["--tasks", "local", "--output_path", str(folder / "out"), "--log_samples", *options]
    run(command, {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}, folder)
    (samples,) = (folder / "out").rglob("samples_local_*.jsonl")
    return {"samples": [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]}


def test_lm_eval_generates(endpoint: Endpoint, tmp_path: Path) -> None:
    needs("lm_eval")
    questions = [QUESTION, "def add(a, b):", "Name a colour."]
    rows = [json.dumps({"question": question, "answer": endpoint.answer(question)}) for question in questions]
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    task = f"""task: local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{max_gen_toks: 20, temperature: 0, until: ["<nothing ends it>"]}}
metric_list: [{{metric: exact_match}}]
"""
    found = lm_eval(endpoint, tmp_path, task, "local-chat-completions", CHAT, "--apply_chat_template")
    answers = {sample["doc"]["question"]: sample["resps"][0][0] for sample in found["samples"]}
    assert answers == {question: endpoint.answer(question) for question in questions}


def test_lm_eval_reads_log_likelihoods(endpoint: Endpoint, tmp_path: Path) -> None:
    """It sends token ids with `echo` and reads the log-probabilities of the prompt's end."""
    needs("lm_eval")
    docs = [("One and one is", [" two", " three"]), ("Grass is", [" green", " loud"])]
    rows = [json.dumps({"text": text, "choices": choices, "label": 0}) for text, choices in docs]
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    task = f"""task: local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
    found = lm_eval(endpoint, tmp_path, task, "local-completions", "/v1/completions")
    target = endpoint.decoder.target
    for sample in found["samples"]:
        for choice, response in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            prompt, ids = sample["doc"]["text"].encode(), [*(sample["doc"]["text"] + choice).encode()]
            with torch.no_grad():
                log_probs = target.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            expected = sum(float(log_probs[i - 1, ids[i]]) for i in range(len(prompt), len(ids)))
            value = float(response[0][0] if isinstance(response[0], list) else response[0])
            assert math.isclose(value, expected, abs_tol=1e-3), (choice, value, expected)


def test_locust(endpoint: Endpoint, tmp_path: Path) -> None:
    needs("locust")
    (tmp_path / "locustfile.py").write_text(LOCUSTFILE, encoding="utf-8")
    options = ["--headless", "-u", "4", "-r", "4", "-t", "12s", "--stop-timeout", "30", "--exit-code-on-error", "1"]
    run([program("locust"), "-f", "locustfile.py", *options, "-H", endpoint.url, "--csv", "load"], {}, tmp_path)
    total = (tmp_path / "load_stats.csv").read_text(encoding="utf-8").splitlines()[-1].split(",")
    assert int(total[2]) > 10 and int(total[3]) == 0  # requests, failures
    wait_until(lambda: endpoint.replica.num_requests == 0)


def test_guidellm(endpoint: Endpoint, tmp_path: Path) -> None:
    """It asks for answers of a fixed length, with `ignore_eos` and usage in every event, and counts their tokens."""
    needs("guidellm")
    before, report = endpoint.replica.snapshot(), tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={endpoint.url},model=tiny,request_format={CHAT}",
        "tokenizer": f"kind=huggingface_auto,model={endpoint.target}",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=20",
        "profile": "kind=concurrent,streams=4",
        "constraint": "kind=max_requests,count=12",
        "output": f"kind=json,path={report}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    run([program("guidellm"), "run", *words, "--disable-console"], variables, tmp_path)
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 12 and totals["errored"] == 0
    wait_until(lambda: endpoint.replica.num_requests == 0)
    after = endpoint.replica.snapshot()
    assert after.num_finished["length"] - before.num_finished.get("length", 0) >= 12
    assert after.num_finished.get("error", 0) == before.num_finished.get("error", 0)


def test_schemathesis(tmp_path: Path) -> None:
    """Bodies made from the endpoint's own document, right ones and wrong ones: each is answered as it says."""
    needs("schemathesis")
    described = document()
    for schema in described["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": ["tiny"]}  # any other name is a 404 and nothing more
    (tmp_path / "openapi.json").write_text(json.dumps(described), encoding="utf-8")
    config = EngineConfig(max_running=ROWS, max_model_len=80, num_pages=16)
    with serving_tiny(tmp_path, config) as endpoint:
        options = {
            "url": endpoint.url,
            "include-method": "POST",
            "checks": "not_a_server_error",
            "phases": "fuzzing",
            "max-examples": "90",
            "suppress-health-check": "all",
            "generation-database": "none",
            "request-timeout": "60",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        command = [program("schemathesis"), "run", "openapi.json", *words, "--generation-deterministic"]
        run(command, {}, tmp_path)
        assert httpx2.get(endpoint.url + "/health", timeout=60).status_code == 200
    statuses = [(path, status) for method, path, status in endpoint.answered if method == "POST"]
    assert len(statuses) >= 300 and {path for path, _ in statuses} == POSTS.keys()
    for path in POSTS:
        seen = {str(status) for found, status in statuses if found == path}
        assert {"200", "400"} <= seen <= described["paths"][path]["post"]["responses"].keys() - {"500", "503"}, path
