"""What a request may say: the fields of OpenAI's API and those that other servers added, as records.

Place in the flow: the routes give the body of a request to `parse`. What comes back is honoured in full. A field that
would change the answer and is not honoured is refused with its name; fields at the value that changes nothing are
accepted, and `IGNORED` fields never change an answer.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lilicorr.logprobs import MAX_LOGPROBS
from lilicorr.processing import MAX_LOGIT_BIAS
from serve_app.errors import ApiError

MAX_STOP_STRINGS = 4
MAX_CHOICES = 128
COMPLETION_LOGPROBS = 5  # of the older API
COMPLETION_TOKENS = 16  # what the older API answers with unless told otherwise

IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
}

# Fields that are not implemented, and the values at which they do nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "best_of": (1,),
}
NEUTRAL_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "echo": (False,),
}

# Arguments of the rendering itself; a template variable may have any other name.
RESERVED_TEMPLATE_KWARGS = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "self",
}  # fmt: skip


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


def _bias(bias: dict[str, float]) -> dict[str, float]:
    """Keys are token ids in decimal, as JSON spells them, each once."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and str(int(key[:20])) == key):
            raise ValueError(f"{key!r} is not a token id")
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"at most {MAX_LOGIT_BIAS} token ids, got {len(bias)}")
    return bias


def _prompts(prompt: Any) -> Any:
    """A string, a list of strings, token ids or a list of token ids: as a list of prompts."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _are_ids(prompt)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("must be a string, token ids, or a list of these, and not empty")
    for index, item in enumerate(prompt):
        if isinstance(item, str):
            _unicode(item)
        elif not (isinstance(item, list) and _are_ids(item)):
            raise ValueError(f"item {index} is neither a string nor a list of token ids")
        if len(item) == 0:
            raise ValueError(f"item {index} is empty; there is nothing to continue")
    if len({isinstance(item, str) for item in prompt}) > 1:
        raise ValueError("strings and token ids cannot stand beside each other")
    return prompt


def _are_ids(values: list[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(_Strict):
    """A part of a content."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One turn. `developer` is OpenAI's newer name of `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str, BeforeValidator(_content_text, json_schema_input_type=str | list[TextPart]), AfterValidator(_unicode)
    ]

    def as_dict(self) -> dict[str, str]:
        """As the chat template wants it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


Text = Annotated[str, AfterValidator(_unicode)]
StopString = Annotated[str, Field(min_length=1), AfterValidator(_unicode)]
TokenId = Annotated[int, Field(ge=0)]
SomeStops = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
StopStrings = Annotated[SomeStops, BeforeValidator(_stop_strings, json_schema_input_type=StopString | SomeStops | None)]
SomeIds = Annotated[list[TokenId], Field(min_length=1)]
SomeText = Annotated[str, Field(min_length=1)]
SomePrompts = (
    SomeText | SomeIds | Annotated[list[SomeText], Field(min_length=1)] | Annotated[list[SomeIds], Field(min_length=1)]
)
Messages = Annotated[list[Annotated[Message, BeforeValidator(_without_nulls)]], Field(min_length=1)]
TemplateKwargs = Annotated[dict[str, Any] | None, BeforeValidator(_template_kwargs)]


class Rendering(_Strict):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = None  # true, unless the final message is continued
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs = None


class AnswerRequest(_Strict):
    """The fields that both routes have and honour. null is the default of every field that has one."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL
    prompt_field: ClassVar[str]

    model: Text
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0: off
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopStrings = []
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], AfterValidator(_bias)] | None = None
    cache_salt: Text | None = None
    return_token_ids: bool | None = None
    return_speculative_metrics: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def token_limit(self) -> tuple[str, int] | None:
        """The field that limits the answer and its value, None where none is given."""
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report beside each token, None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return None

    def check(self) -> None:
        """Raise ApiError (400) for values that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", "stream_options", "invalid_value")
        if self.token_limit is not None and self.token_limit[1] == 0 and self.num_prompt_logprobs is None:
            message = f"{self.token_limit[0]} must be at least 1"
            raise ApiError(400, message, self.token_limit[0], "invalid_value")


class ChatRequest(AnswerRequest, Rendering):
    """POST /v1/chat/completions."""

    neutral = NEUTRAL | NEUTRAL_IN_CHAT
    prompt_field = "messages"

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def token_limit(self) -> tuple[str, int] | None:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().token_limit

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            message = f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} differ"
            raise ApiError(400, message, "max_tokens", "invalid_value")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
        check_rendering(self)


class CompletionRequest(AnswerRequest):
    """POST /v1/completions."""

    neutral = NEUTRAL | {"suffix": ("",)}
    prompt_field = "prompt"

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts, json_schema_input_type=SomePrompts)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=COMPLETION_LOGPROBS)
    add_special_tokens: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


class TokenizeRequest(Rendering):
    """POST /tokenize: of a prompt, or of a conversation as the chat route would render it."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raise ApiError (400) unless there is one thing to tokenise."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "prompt or messages is required, and not both", "prompt", "invalid_value")
        check_rendering(self)


class DetokenizeRequest(_Strict):
    """POST /detokenize."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: Text | None = None
    tokens: list[TokenId]

    def check(self) -> None:
        """Nothing can contradict anything."""


def check_rendering(request: Rendering) -> None:
    """Raise ApiError (400) for a message that is to be continued and answered."""
    if request.continue_final_message and request.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise ApiError(400, message, "continue_final_message", "invalid_value")


Parsed = TypeVar("Parsed", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """Validate the body of a request. Raises ApiError (400) that names the field."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(fields).__name__}", code="invalid_json")
    for name, values in kind.neutral.items():
        value = fields.pop(name, None)
        if value is not None and not any(_same(value, neutral) for neutral in values):
            wanted = " or ".join(json.dumps(neutral) for neutral in values)
            message = f"{name} is not supported here: leave it out or send {wanted}"
            raise ApiError(400, message, name, "unsupported_parameter")
    fields = {name: value for name, value in fields.items() if name not in IGNORED}
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from error
    request.check()
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
