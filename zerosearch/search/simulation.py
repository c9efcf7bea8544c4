"""A simulation LLM in the place of the search engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from verl.workers.rollout.engine import InfrastructureError, SampleKey
from zerosearch.prompts import PromptTemplate
from zerosearch.search.backend import Label, SearchRequest, SearchResult
from zerosearch.search.noise import Draw, document_seed, draw_label, query_identity
from zerosearch.search.single_flight import SingleFlight
from zerosearch.simulation.client import ChatClient, ChatSampling
from zerosearch.transport import RequestRejectedError, ServerUnavailableError

_MARK = re.compile(r"(?:^|(?<=\s))Doc (\d+):")
_ATTEMPTS_AT_EMPTY_REPLIES = 3
_REMEMBERED = 4096
_LONGEST_QUERY = 512


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """``documents`` in order, at most topk; ``cut`` how many more the reply held."""

    documents: tuple[str, ...]
    cut: int


def parse_documents(reply: str, topk: int) -> ParsedReply:
    """Reads ``Doc 1: …\\nDoc 2: …``.

    What stands before the first mark is dropped, everything from the first mark above ``topk`` on is
    cut, blank documents do not count. A reply without any mark is one document.
    """
    marks = list(_MARK.finditer(reply))
    if not marks:
        return ParsedReply(tuple(filter(None, [reply.strip()])), 0)
    ends = [mark.start() for mark in marks[1:]] + [len(reply)]
    texts = [(int(mark[1]), reply[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]
    last = next((i for i, (number, _) in enumerate(texts) if number > topk), len(texts))
    kept = [text for _, text in texts[:last] if text]
    cut = sum(bool(text) for _, text in texts[last:]) + len(kept[topk:])
    return ParsedReply(tuple(kept[:topk]), cut)


class SimulationBackend:
    """Draws useful or noisy, asks the simulation LLM, reads its documents.

    Within a trajectory a repeated search (same label, normalised query, key) is answered from
    memory. Its seed is a function of key and query, so a server that honours seeds gives the same
    documents in every run.
    """

    def __init__(
        self, name: str, client: ChatClient, template: PromptTemplate, sampling: ChatSampling, draw: Draw
    ) -> None:
        self._name = name
        self._client = client
        self._template = template
        self._sampling = sampling
        self._draw: Draw = draw
        self._answers: SingleFlight[SearchResult] = SingleFlight(_REMEMBERED)

    async def search(self, request: SearchRequest) -> SearchResult:
        """Raises InfrastructureError when no usable reply came; a remembered result has 0 attempts and latency."""
        label = draw_label(request, self._draw)
        identity = (label, request.key, request.topk, *query_identity(request, self._draw))
        result, shared = await self._answers.get(identity, lambda: self._simulate(request, label))
        return replace(result, attempts=0, latency=0.0) if shared else result

    async def _simulate(self, request: SearchRequest, label: Label, patient: bool = True) -> SearchResult:
        prompt = self.render(request, label)
        attempts, latency = 0, 0.0
        for empty_replies in range(_ATTEMPTS_AT_EMPTY_REPLIES):
            seed = document_seed(request, self._draw, empty_replies)
            reply = await self._client.complete(prompt, self._sampling, seed, patient=patient)
            attempts, latency = attempts + reply.attempts, latency + reply.latency
            parsed = parse_documents(reply.text, request.topk)
            if parsed.documents:
                return SearchResult(parsed.documents, label, self._name, attempts, latency, parsed.cut)
        raise InfrastructureError(
            f"{self._client.urls[0]}: {_ATTEMPTS_AT_EMPTY_REPLIES} replies without a document for {request.query!r}"
        )

    @property
    def pause(self) -> str | None:
        """A sentence while every server is down."""
        return self._client.pause

    def paused_seconds(self, since: float) -> float:
        """How much of the time from ``since`` (``time.monotonic``) to now every server was down."""
        return self._client.paused_seconds(since)

    def render(self, request: SearchRequest, label: Label) -> str:
        """The prompt of one search; of a query longer than 512 characters its beginning."""
        return self._template.render(
            query=cut_query(request.query),
            label=label.value.capitalize(),
            kind=label.value,
            question=" ".join(request.question.split()),
            golden_answers=join_answers(request.golden_answers),
            topk=request.topk,
        )

    async def preflight(self) -> list[str]:
        """Asks every server for its models, then runs one real search."""
        found = await asyncio.gather(*map(self._server_problems, self._client.urls))
        return [problem for problems in found for problem in problems] or await self._trial_problems()

    async def _server_problems(self, url: str) -> list[str]:
        try:
            models = await self._client.served_models(url)
        except ServerUnavailableError as error:
            return [f"the simulation server does not answer ({error}): start it, or correct IP (retriever.ip)"]
        except RequestRejectedError as error:
            return [f"the simulation server refuses to list its models ({error}): check retriever.ip and .api_key"]
        wanted = self._client.model
        if wanted and wanted not in models:
            served = ", ".join(models)
            fix = "serve it, or set SIMULATION_LLM (retriever.simulation_llm) to what is served, or to nothing"
            return [f"the simulation server {url} serves {served} and not {wanted}: {fix}"]
        return []

    async def _trial_problems(self) -> list[str]:
        key = SampleKey(seed=0, step=0, uid="preflight", sample=0)
        question = "What is the capital of France?"
        try:
            request = SearchRequest("capital of France", question, ("Paris",), 0.0, key, turn=1, topk=1)
            await self._simulate(request, Label.USEFUL, patient=False)
        except InfrastructureError as error:
            return [f"a trial search failed ({error}): check the simulation server, its model and retriever.*"]
        return []

    async def close(self) -> None:
        await self._answers.close()
        await self._client.close()


def cut_query(query: str) -> str:
    """At most 512 characters, cut at a word where there is one: what a policy writes must not
    overflow the server's context, because a refused request is no fault that can be trained on."""
    if len(query) <= _LONGEST_QUERY:
        return query
    return query[: _LONGEST_QUERY + 1].rpartition(" ")[0] or query[:_LONGEST_QUERY]


def join_answers(answers: Sequence[str]) -> str:
    """All gold answers as the simulation LLM reads them: "a; b"."""
    return "; ".join(" ".join(answer.split()) for answer in answers)
