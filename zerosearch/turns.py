"""The turns of one trajectory: generate, read the action, search, observe, until it ends.

Invariants: the context is prompt ids plus segment ids, never text; a segment's ids are exactly
those that were sampled or shown; nothing the policy did not sample is a policy token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from verl.agent_loop.base import RolloutLimits, RolloutTask, RunEndingError
from verl.agent_loop.trajectory import Segment, SegmentKind, TokenIds, TrajectoryStatus
from verl.workers.rollout.engine import (
    Generation,
    GenerationRequest,
    InfrastructureError,
    RolloutEngine,
    StopReason,
)
from zerosearch.actions import STOP_STRINGS, Action, ActionKind, InvalidKind, ThinkMode, opens_thinking, parse_action
from zerosearch.prompts import Observation, encode_information, encode_plain, render_information
from zerosearch.records import Episode, SearchRecord
from zerosearch.reward import contains_gold
from zerosearch.search.backend import SearchBackend, SearchRequest, SearchResult
from zerosearch.text import normalize_text
from zerosearch.transport import RequestRejectedError

_PROMPT_TAIL = 8


@dataclass(frozen=True)
class TurnRules:
    """What is the same for every trajectory of a run."""

    tokenizer: PreTrainedTokenizerBase
    limits: RolloutLimits
    max_turns: int
    topk: int
    think: ThinkMode
    corrective_ids: TokenIds
    smallest_observation: int

    @classmethod
    def make(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        limits: RolloutLimits,
        *,
        max_turns: int,
        topk: int,
        think: ThinkMode,
        corrective_message: str,
    ) -> TurnRules:
        """Raises ValueError when ``max_observation_length`` cannot hold the layout of topk documents, or the
        corrective message."""
        empty = (render_information([""] * topk), render_information([]))
        layout = max(len(encode_plain(tokenizer, text)) for text in empty)
        if layout >= limits.max_observation_length:
            raise ValueError(
                f"rollout.max_observation_length is {limits.max_observation_length}, but {topk} documents "
                f"(retriever.topk) without any text already take {layout} tokens"
            )
        corrective = encode_plain(tokenizer, corrective_message)
        if len(corrective) > limits.max_observation_length:
            raise ValueError(
                f"retriever.corrective_message has {len(corrective)} tokens, but "
                f"rollout.max_observation_length is {limits.max_observation_length}"
            )
        smallest = len(encode_plain(tokenizer, render_information([""])))
        return cls(tokenizer, limits, max_turns, topk, think, corrective, smallest)


@dataclass
class Turns:
    """One trajectory while it runs; ``segments``, ``status`` and ``episode`` are its outcome.

    ``generate_seconds`` and ``search_seconds`` are wall-clock, waiting included.
    """

    rules: TurnRules
    task: RolloutTask
    engine: RolloutEngine
    backend: SearchBackend
    episode: Episode
    segments: list[Segment] = field(default_factory=list)
    status: TrajectoryStatus = TrajectoryStatus.TURNS_EXHAUSTED
    generate_seconds: float = 0.0
    search_seconds: float = 0.0

    def __post_init__(self) -> None:
        tail = self.rules.tokenizer.decode(list(self.task.prompt.prompt_ids[-_PROMPT_TAIL:]), skip_special_tokens=False)
        self._thinking = opens_thinking(str(tail))
        self._context = list(self.task.prompt.prompt_ids)
        self._remaining = self.rules.limits.max_response_length

    async def run(self) -> None:
        """At most ``max_turns`` + 1 generations, the last of which cannot search."""
        try:
            for turn in range(1, self.rules.max_turns + 2):
                ended = await self._turn(turn, last=turn > self.rules.max_turns)
                if ended is not None:
                    self.status = ended
                    return
        finally:
            await self.engine.release(self.task.session)

    async def _turn(self, turn: int, last: bool) -> TrajectoryStatus | None:
        """One generation and what follows from it; the status that ends the trajectory, or None."""
        action = await self._generate()
        self._note(action)
        if action.kind is ActionKind.ANSWER:
            self.episode = replace(self.episode, answer=action.text)
            return TrajectoryStatus.ANSWERED
        if action.kind is ActionKind.SEARCH and last:
            self.episode = replace(self.episode, refused_searches=1)
            return TrajectoryStatus.TURNS_EXHAUSTED
        if action.kind is ActionKind.SEARCH:
            return await self._search(turn, action.text)
        if action.invalid is InvalidKind.TRUNCATED_TURN and self._remaining == 0:
            return TrajectoryStatus.TRUNCATED
        assert action.invalid is not None
        self.episode = replace(self.episode, invalid=(*self.episode.invalid, action.invalid))
        return TrajectoryStatus.TURNS_EXHAUSTED if last else self._observe(self.rules.corrective_ids, action.invalid)

    def _note(self, action: Action) -> None:
        self._thinking = action.thinking
        forged = self.episode.forged_information + action.forged_information
        self.episode = replace(self.episode, forged_information=forged)

    async def _generate(self) -> Action:
        """One generation as one policy segment. Under strict rules it goes on past an action inside <think>."""
        begin = time.perf_counter()
        room = min(self.task.sampling.max_tokens, self.rules.limits.max_turn_length, self._remaining)
        parts: list[Generation] = []
        action = Action(ActionKind.UNFINISHED)
        while action.kind is ActionKind.UNFINISHED:
            parts.append(await self._continue(room))
            room -= len(parts[-1].token_ids)
            stop = parts[-1].stop_reason
            action = self._parse(parts, StopReason.LENGTH if room == 0 and stop is StopReason.STOP_STRING else stop)
        self.segments.append(_policy_segment(parts))
        self._remaining -= len(self.segments[-1].token_ids)
        self.generate_seconds += time.perf_counter() - begin
        return action

    async def _continue(self, room: int) -> Generation:
        sampling = replace(self.task.sampling, max_tokens=room, stop=STOP_STRINGS)
        stream = self.task.key.stream("policy")
        part = await self.engine.generate(GenerationRequest(self.task.session, tuple(self._context), sampling, stream))
        assert 0 < len(part.token_ids) <= room, "a generation holds at least one token and keeps to its limit"
        self._context.extend(part.token_ids)
        return part

    def _parse(self, parts: Sequence[Generation], stop: StopReason) -> Action:
        ids = [token for part in parts for token in part.token_ids]
        text = self.rules.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return parse_action(str(text), stop, mode=self.rules.think, thinking=self._thinking)

    async def _search(self, turn: int, query: str) -> TrajectoryStatus | None:
        if self.rules.smallest_observation >= self._remaining:
            return TrajectoryStatus.TRUNCATED
        begin = time.perf_counter()
        result = await self._ask(turn, query)
        self.search_seconds += time.perf_counter() - begin
        limit = self.rules.limits.max_observation_length
        observation = encode_information(self.rules.tokenizer, result.documents, limit)
        record = self._record(turn, query, result, observation)
        self.episode = replace(self.episode, searches=(*self.episode.searches, record))
        return self._observe(observation.token_ids, record)

    async def _ask(self, turn: int, query: str) -> SearchResult:
        """A search that failed within its deadline is issued anew once, its tokens and cache kept."""
        request = SearchRequest(
            query=query,
            question=self.episode.question,
            golden_answers=self.episode.golden_answers,
            noise_probability=self.episode.noise_probability,
            key=self.task.key,
            turn=turn,
            topk=self.rules.topk,
        )
        try:
            return await _search_anew_once(self.backend, request)
        except InfrastructureError as error:
            error.environment = replace(self.episode, failed_query=query)
            raise

    def _record(self, turn: int, query: str, result: SearchResult, observation: Observation) -> SearchRecord:
        return SearchRecord(
            turn=turn,
            query=query,
            normalized_query=normalize_text(query),
            label=result.label,
            backend=result.backend,
            documents=observation.documents,
            cut=result.cut,
            truncated=observation.truncated,
            gold_in_documents=any(contains_gold(text, self.episode.golden_answers) for text in observation.documents),
            attempts=result.attempts,
            latency=result.latency,
            engine_calls=result.engine_calls,
        )

    def _observe(self, ids: TokenIds, info: SearchRecord | InvalidKind) -> TrajectoryStatus | None:
        """Appends an observation if at least one more policy token fits behind it."""
        if len(ids) >= self._remaining:
            return TrajectoryStatus.TRUNCATED
        self.segments.append(Segment(SegmentKind.OBSERVATION, ids, info=info))
        self._context.extend(ids)
        self._remaining -= len(ids)
        return None


async def _search_anew_once(backend: SearchBackend, request: SearchRequest) -> SearchResult:
    try:
        return await backend.search(request)
    except (RequestRejectedError, RunEndingError):
        raise
    except InfrastructureError:
        return await backend.search(request)


def _policy_segment(parts: Sequence[Generation]) -> Segment:
    """The tokens of one generation, however many requests it took."""
    return Segment(
        SegmentKind.POLICY,
        tuple(token for part in parts for token in part.token_ids),
        tuple(value for part in parts for value in part.log_probs),
        _merged_runs(run for part in parts for run in part.weights_versions),
    )


def _merged_runs(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Runs of (version, length) with equal neighbours put together."""
    merged: list[tuple[int, int]] = []
    for version, length in runs:
        if merged and merged[-1][0] == version:
            length += merged.pop()[1]
        merged.append((version, length))
    return tuple(merged)
