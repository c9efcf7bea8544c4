"""The one parser of <think>, <search>, <answer> and <information>.

Rollout, reward and evaluation all read a policy's text through it. It reads one generation at a
time and only what the policy wrote, so tags in documents or in the instruction never count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from verl.workers.rollout.engine import StopReason

STOP_STRINGS = ("</search>", "</answer>")
"""Where a generation ends."""

ThinkMode = Literal["lenient", "strict"]

_TAG = re.compile(r"<(/?)(think|search|answer|information)>")


class ActionKind(StrEnum):
    SEARCH = "search"
    ANSWER = "answer"
    INVALID = "invalid"
    UNFINISHED = "unfinished"


class InvalidKind(StrEnum):
    """Why a generation holds no action: a query without text; an end of sequence or a closing tag
    without its opening one; the turn's cap."""

    BLANK_QUERY = "blank_query"
    NO_ACTION = "no_action"
    TRUNCATED_TURN = "truncated_turn"


@dataclass(frozen=True, slots=True)
class Action:
    """What a generation holds first.

    ``text`` is the query (runs of white space as one space) or the answer (stripped, possibly
    blank). ``thinking`` says whether a <think> is open at the end; ``forged_information`` counts
    the <information> tags that the policy wrote. UNFINISHED: the engine stopped at a closing tag
    inside an open <think> under strict rules, so the same generation has to go on.
    """

    kind: ActionKind
    text: str = ""
    invalid: InvalidKind | None = None
    thinking: bool = False
    forged_information: int = 0


@dataclass(frozen=True, slots=True)
class _Scan:
    """The first closing tag that counts, if any: ``name``, and ``body`` when it was opened."""

    name: str | None
    body: str | None
    thinking: bool
    forged: int


def parse_action(text: str, stop: StopReason, *, mode: ThinkMode = "lenient", thinking: bool = False) -> Action:
    """Reads the text of one generation, which ended for the reason ``stop``.

    The first </search> or </answer> decides and what follows it is ignored; the action's text
    begins at the last opening tag of that name before it. Lenient: an action counts wherever it
    stands. Strict: tags inside an open <think> do not count; ``thinking`` says whether one is open
    at the start.
    """
    scan = _scan(text, mode, thinking)
    if scan.name is None and stop is StopReason.STOP_STRING and mode == "strict":
        return Action(ActionKind.UNFINISHED, thinking=scan.thinking, forged_information=scan.forged)
    if scan.body is None:
        capped = scan.name is None and stop is StopReason.LENGTH
        return _invalid(InvalidKind.TRUNCATED_TURN if capped else InvalidKind.NO_ACTION, scan)
    if scan.name == "answer":
        return Action(ActionKind.ANSWER, scan.body.strip(), None, scan.thinking, scan.forged)
    query = " ".join(scan.body.split())
    if not query:
        return _invalid(InvalidKind.BLANK_QUERY, scan)
    return Action(ActionKind.SEARCH, query, None, scan.thinking, scan.forged)


def _invalid(kind: InvalidKind, scan: _Scan) -> Action:
    return Action(ActionKind.INVALID, "", kind, scan.thinking, scan.forged)


def _scan(text: str, mode: ThinkMode, thinking: bool) -> _Scan:
    opened: dict[str, int] = {}
    forged = 0
    for closing, name, start, end in _tags(text):
        if name == "think":
            thinking = not closing
        elif name == "information":
            forged += not closing
        elif thinking and mode == "strict":
            continue
        elif not closing:
            opened[name] = end
        else:
            body = text[opened[name] : start] if name in opened else None
            return _Scan(name, body, thinking, forged)
    return _Scan(None, None, thinking, forged)


def _tags(text: str) -> Iterator[tuple[bool, str, int, int]]:
    """(closing, name, start, end) of every tag, in order."""
    for match in _TAG.finditer(text):
        yield match[1] == "/", match[2], match.start(), match.end()


def opens_thinking(prompt_text: str) -> bool:
    """Whether a rendered prompt ends in a <think> that its template opened for the policy. The tags
    that the instruction mentions do not count."""
    return prompt_text.rstrip().endswith("<think>")
