"""From the values of a row to chat messages, and from messages to the text a policy reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class PromptFormat:
    """How a row becomes prompt ids.

    A row's own ``prompt_key`` messages are taken verbatim; otherwise the question is put into
    ``template`` as the one user message. Never both.
    """

    template: str
    prompt_key: str = "prompt"
    question_key: str = "question"
    max_prompt_length: int = 2048
    filter_overlong: bool = True

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Raises ValueError when the row holds neither well-formed messages nor a question."""
        own = row.get(self.prompt_key)
        if own is not None and own != []:
            return _checked_messages(own, self.prompt_key)
        question = row.get(self.question_key)
        if question is None:
            question = _mapping(row, "extra_info").get("question")
        if not isinstance(question, str) or not question.strip():
            found = "" if question is None else f", not {question!r}"
            raise ValueError(
                f"needs {self.prompt_key!r} (chat messages) or {self.question_key!r} (a non-empty string){found}"
            )
        return [{"role": "user", "content": self.template.replace("{question}", question.strip())}]

    def missing_columns(self, columns: Sequence[str]) -> str:
        """What is wrong with a file of these columns as a whole; empty when a prompt can come from them."""
        if {self.prompt_key, self.question_key, "extra_info"} & set(columns):
            return ""
        return (
            f"has neither the column {self.prompt_key!r} (chat messages) nor {self.question_key!r}; its columns are "
            f"{', '.join(columns) or 'none'}: name yours with data.question_key or data.prompt_key"
        )


def _mapping(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = row.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key!r} is {value!r}, not a mapping")
    return value


def _checked_messages(own: Any, key: str) -> list[dict[str, str]]:
    if not isinstance(own, list | tuple):
        raise ValueError(
            f"{key!r} is {type(own).__name__}, not a list of chat messages; for plain questions set data.question_key"
        )
    messages = [_checked_message(message, f"{key}[{number}]") for number, message in enumerate(own)]
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{key!r} ends with the assistant's message: nothing is left to answer")
    return messages


def _checked_message(message: Any, place: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} is {message!r}, not a message with 'role' and 'content'")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{place} has the role {role!r}; known are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{place} has no text as content but {content!r}")
    return {"role": role, "content": content}


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> str:
    """The chat template applied; without one the contents joined by blank lines.

    Raises ValueError where the template refuses the messages.
    """
    if not tokenizer.chat_template:
        return "\n\n".join(message["content"] for message in messages) + "\n"
    try:
        text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    assert isinstance(text, str)
    return text
