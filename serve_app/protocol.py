"""What a chat request may say, and how the endpoint says no: OpenAI's field names and error shape.

Place in the flow: `api` gives the body of a request to `parse_chat_request`. What comes back is honoured
in full. A field that would change the answer and is not honoured is refused with the field's name; fields
at the value that changes nothing are accepted, and `IGNORED` fields never change an answer.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

MAX_STOP_STRINGS = 4

IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}

# Fields that are not implemented, and the values at which they do nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
}

# Arguments of the rendering itself; a template variable may have any other name.
RESERVED_TEMPLATE_KWARGS = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "self",
}  # fmt: skip


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def _content_text(content: Any) -> Any:
    """A string, or a list of text parts as one string."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(f"part {index} is not of type text, the only one supported")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"part {index} must have the keys type and text, and text must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _unicode(text: str) -> str:
    """JSON can spell half a character, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"no valid Unicode: {error.reason} at character {error.start}") from error
    return text


def _without_nulls(message: Any) -> Any:
    """A message without its null fields: an answer's message, sent back, has some."""
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _stop_strings(stop: Any) -> Any:
    """None, a string or a list as a list."""
    return [] if stop is None else [stop] if isinstance(stop, str) else stop


def _template_kwargs(kwargs: Any) -> Any:
    if isinstance(kwargs, dict) and not RESERVED_TEMPLATE_KWARGS.isdisjoint(kwargs):
        raise ValueError(f"{', '.join(sorted(RESERVED_TEMPLATE_KWARGS & kwargs.keys()))} cannot be set")
    return kwargs


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Message(_Strict):
    """One turn. `developer` is OpenAI's newer name of `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content_text), AfterValidator(_unicode)]

    def as_dict(self) -> dict[str, str]:
        """As the chat template wants it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


StopString = Annotated[str, Field(min_length=1)]


class ChatRequest(_Strict):
    """The fields of a chat request that are honoured. null is the default everywhere but in model and messages."""

    model: str
    messages: list[Annotated[Message, BeforeValidator(_without_nulls)]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0: off
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[StopString], BeforeValidator(_stop_strings), Field(max_length=MAX_STOP_STRINGS)] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_template_kwargs)] = None

    @property
    def token_limit(self) -> tuple[str, int] | None:
        """The field that limits the answer and its value, None where neither is given."""
        for name in ("max_completion_tokens", "max_tokens"):
            if getattr(self, name) is not None:
                return name, getattr(self, name)
        return None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def parse_chat_request(body: bytes) -> ChatRequest:
    """Validate the body of a chat request. Raises ApiError (400) that names the field."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(fields).__name__}", code="invalid_json")
    for name, values in NEUTRAL.items():
        value = fields.pop(name, None)
        if value is not None and not any(_same(value, neutral) for neutral in values):
            wanted = " or ".join(json.dumps(neutral) for neutral in values)
            message = f"{name} is not supported here: leave it out or send {wanted}"
            raise ApiError(400, message, name, "unsupported_parameter")
    fields = {name: value for name, value in fields.items() if name not in IGNORED}
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from error
    _check_together(request)
    return request


def _same(value: Any, neutral: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _refusal(error: ValidationError) -> ApiError:
    """The first problem pydantic found, as an answer; an unknown field comes before a wrong value."""
    problems = error.errors(include_url=False, include_context=False)
    problem = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    kind, message = problem["type"], problem["msg"].removeprefix("Value error, ")
    param = ""
    for part in problem["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    if kind == "extra_forbidden":
        return ApiError(400, f"{param} is not a parameter of this endpoint", param, "unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param} is required", param, "missing_required_parameter")
    return ApiError(400, f"{param}: {message}", param, "invalid_value")


def _check_together(request: ChatRequest) -> None:
    """Refuse values that contradict each other."""
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream to be true", "stream_options", "invalid_value")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        message = f"max_tokens {request.max_tokens} and max_completion_tokens {request.max_completion_tokens} differ"
        raise ApiError(400, message, "max_tokens", "invalid_value")
