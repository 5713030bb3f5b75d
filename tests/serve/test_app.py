"""The real Serve application: a random target, a small random draft model, and the OpenAI SDK.

One local Ray instance for all of it, on free ports.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from fakes import wait_until
from models import load, save_random_checkpoint, serving
from test_metrics import total

from lilicorr.chat import answer_text, render_prompt
from lilicorr.checkpoint import load_draft_model
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.tiny import tiny_target_folder

QUESTIONS = ["What is 1 + 1?", "def add(a, b):", "ď 漢字"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target_folder(folder / "target")
    save_random_checkpoint(folder / "checkpoint", target, seed=0)
    return target, folder / "checkpoint"


def reference_texts(target: Path, checkpoint: Path, params: SamplingParams) -> list[str]:
    """What decode.py answers to QUESTIONS, without the end of a character that was cut off."""
    loaded = load(target)
    decoder = Decoder(loaded, load_draft_model(checkpoint, loaded))
    texts = []
    for question in QUESTIONS:
        prompt_ids = render_prompt(loaded.tokenizer, [{"role": "user", "content": question}], {})
        token_ids = decoder.generate(prompt_ids, params).token_ids
        whole = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(i for i in token_ids if i < 256))
        assert answer_text(loaded.tokenizer, token_ids).removesuffix("\ufffd") == whole.removesuffix("\ufffd")
        texts.append(whole)
    return texts


@pytest.fixture(scope="module")
def endpoint(ray_cluster: None, folders: tuple[Path, Path]) -> Iterator[str]:
    """The URL of the application on a Ray instance of its own."""
    with serving(*folders, version="abc", engine={"max_running": 1, "num_pages": 40}) as url:
        yield url


@pytest.mark.ray
@pytest.mark.parametrize("params", [SamplingParams(40, stop_ids=(258,)), SamplingParams(40, 0.8, 20, 0.95, 7, (258,))])
def test_sdk_gets_the_text_of_the_reference_decoder(
    endpoint: str, folders: tuple[Path, Path], params: SamplingParams
) -> None:
    expected = reference_texts(*folders, params)
    with openai.OpenAI(base_url=f"{endpoint}/v1", api_key="none") as sdk:
        for question, text in zip(QUESTIONS, expected):
            request = {
                "model": "tiny",
                "messages": [{"role": "user", "content": question}],
                "max_tokens": params.max_new_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "seed": params.seed,
                "extra_body": {"top_k": params.top_k},
            }
            whole = sdk.chat.completions.create(**request)
            chunks = list(sdk.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert whole.choices[0].message.content == streamed == text
            assert chunks[-1].usage == whole.usage
            assert whole.usage.completion_tokens <= params.max_new_tokens
            assert whole.system_fingerprint == "abc"


@pytest.mark.ray
def test_models_health_and_refusal_through_the_proxy(endpoint: str) -> None:
    with openai.OpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0) as sdk:
        assert [model.id for model in sdk.models.list()] == ["tiny"]
        request = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        with pytest.raises(openai.BadRequestError, match="response_format"):
            sdk.chat.completions.create(**request, response_format={"type": "json_object"})
    response = httpx2.get(f"{endpoint}/health", headers={"x-request-id": "mine"}, timeout=240)
    assert response.status_code == 200 and response.headers.get_list("x-request-id") == ["mine"]


@pytest.mark.ray
def test_leaving_client_is_noticed_through_the_proxy(endpoint: str) -> None:
    """Three of them: what is left of their answers is not decoded."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "go on"}], "temperature": 0}
    body |= {"max_tokens": 900, "ignore_eos": True}
    with httpx2.Client(base_url=endpoint, timeout=240) as client:

        def counted(name: str, **labels: str) -> float:
            return total(client.get("/metrics").text, name, **labels)

        def aborted() -> float:
            return counted("vllm:request_success_total", finished_reason="abort")

        before, tokens = aborted(), counted("vllm:generation_tokens_total")
        for _ in range(3):
            with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                assert next(response.iter_lines()).startswith("data: ")
        wait_until(lambda: aborted() == before + 3, 240)
        assert counted("vllm:generation_tokens_total") - tokens < 3 * 900
        answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 3}).json()
        assert answer["usage"]["completion_tokens"] == 3
