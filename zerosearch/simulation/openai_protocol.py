"""The part of OpenAI's completion interface that the embedded server speaks: bodies in, bodies out.

Every field is either honoured, neutral, or refused with its name: nothing that changes the text is
silently ignored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "stop_token_ids": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class ApiError(Exception):
    """A refused request: HTTP ``status`` and OpenAI's error fields."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        return error_body(self.status, str(self), self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A chat message; parts of text are joined by line breaks."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class Body(BaseModel):
    """What chat and text completions share. Null means absent, as in OpenAI's schema."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str = ""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError("the body is not a JSON object")
        given = {k: v for k, v in values.items() if v is not None or k == "model"}
        for name, neutral in _NEUTRAL.items():
            if name in given and given.pop(name) not in neutral:
                raise ValueError(f"{name} is not supported by this server; leave it out or neutral")
        return {k: v for k, v in given.items() if k not in _WITHOUT_EFFECT}

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: str | list[str]) -> str | list[str]:
        if isinstance(stop, list) and not all(stop):
            raise ValueError("a stop string is empty")
        return stop

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """An empty string in place of the list means none."""
        return ((self.stop,) if self.stop else ()) if isinstance(self.stop, str) else tuple(self.stop)


class ChatBody(Body):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class CompletionBody(Body):
    prompt: str | list[str] | list[int] | list[list[int]]

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one; a list of numbers is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        numbers = [item for item in self.prompt if isinstance(item, int)]
        return [numbers] if numbers else [item for item in self.prompt if not isinstance(item, int)]


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(cls: type[BodyT], values: Any) -> BodyT:
    """Raises ApiError 400 naming every wrong field."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        items = error.errors()
        fields = [".".join(map(str, item["loc"])) for item in items]
        said = [f"{name}: {item['msg']}" if name else item["msg"] for name, item in zip(fields, items, strict=True)]
        message = "; ".join(text.replace("Value error, ", "") for text in said)
        raise ApiError(400, message, param=fields[0] or None) from error


@dataclass(frozen=True, slots=True)
class Choice:
    """One generated text. ``finish_reason`` is ``stop`` or ``length``; ``tokens`` counts all that were sampled."""

    text: str
    finish_reason: str
    tokens: int


def chat_reply(model: str, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
    listed = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(choices)
    ]
    return _reply("chat.completion", "chatcmpl", model, listed, _usage(choices, prompt_tokens))


def completion_reply(model: str, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
    listed = [
        {"index": index, "text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason}
        for index, choice in enumerate(choices)
    ]
    return _reply("text_completion", "cmpl", model, listed, _usage(choices, prompt_tokens))


def _reply(
    kind: str, prefix: str, model: str, choices: list[dict[str, Any]], usage: Mapping[str, int]
) -> dict[str, Any]:
    name = f"{prefix}-{uuid.uuid4().hex}"
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": dict(usage),
    }


def _usage(choices: Sequence[Choice], prompt_tokens: int) -> dict[str, int]:
    completion = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }


def model_list(model: str, max_model_len: int, created: int) -> dict[str, Any]:
    entry = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "zerosearch",
        "max_model_len": max_model_len,
    }
    return {"object": "list", "data": [entry]}
