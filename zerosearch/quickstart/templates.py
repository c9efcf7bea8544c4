"""The texts around the quickstart's questions and queries; the builder writes them beside the models."""

from __future__ import annotations

from typing import Literal

Label = Literal["Useful", "Noisy"]

POLICY_PROMPT = (
    "Answer the question. You may search with <search> query </search> "
    "and must end with <answer> answer </answer>.\nQuestion: {question}"
)
"""User message for the policy."""

SIMULATION_PROMPT = "Query: {query}\n{label} Output:\n"
"""User message for the simulation LLM. It knows the whole table, so the query alone suffices."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MODEL_LENGTH = 1024
"""Positions that both models have."""

PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
TAGS = tuple(f"<{mark}{name}>" for name in ("think", "search", "information", "answer") for mark in ("", "/"))


def simulation_reply(document: str) -> str:
    """What the simulation LLM answers: the quickstart asks for one document."""
    return f"Doc 1: {document}"
