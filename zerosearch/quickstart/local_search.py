"""The simulation LLM without a server: the same draws and prompts, generated in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl.workers.rollout.engine import GenerationRequest, SampleKey, SamplingParams
from verl.workers.rollout.torch_engine import TorchEngine
from zerosearch.prompts import PromptTemplate
from zerosearch.quickstart.templates import SIMULATION_PROMPT
from zerosearch.quickstart.tokenizer import decode, encode_prompt
from zerosearch.search.backend import Label, SearchRequest, SearchResult
from zerosearch.search.noise import document_seed, draw_label
from zerosearch.search.simulation import parse_documents

TEMPERATURE = 0.4
"""At 0.8 one document in twenty states a wrong fact: sampling noise, not missing knowledge."""

SLOTS = 128
_MAX_TOKENS = 64
_CONTEXT = 224


class LocalSimulation:
    """Implements `SearchBackend` on a simulation LLM held in this process."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._template = PromptTemplate(SIMULATION_PROMPT, "quickstart")
        self._engine = TorchEngine(
            model, tokenizer, max_num_seqs=SLOTS, max_model_len=_CONTEXT, eos_token_ids=[tokenizer.eos_token_id]
        )

    async def search(self, request: SearchRequest) -> SearchResult:
        """The documents for a query, useful or noisy by the request's own draw."""
        begin = perf_counter()
        label = draw_label(request, "trajectory")
        reply = await self.reply(request.query, label, document_seed(request, "trajectory", 0))
        parsed = parse_documents(reply, request.topk)
        return SearchResult(parsed.documents, label, "local", 1, perf_counter() - begin, parsed.cut)

    async def reply(self, query: str, label: Label, stream: int) -> str:
        """The raw reply to one query; equal streams give equal replies."""
        prompt = self._template.render(query=query, label=label.value.capitalize())
        ids = encode_prompt(self._tokenizer, prompt)
        sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=_MAX_TOKENS)
        generation = await self._engine.generate(GenerationRequest(f"{stream}/{query}", tuple(ids), sampling, stream))
        await self._engine.release(f"{stream}/{query}")
        return decode(self._tokenizer, generation.token_ids)

    async def preflight(self) -> list[str]:
        """Nothing can be missing."""
        return []

    async def close(self) -> None:
        """Nothing to close."""


def write_replies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, searches: Sequence[tuple[str, Label]], seed: int
) -> list[str]:
    """The simulator's raw replies to (query, label) pairs, in order."""

    async def run() -> list[str]:
        simulation = LocalSimulation(model, tokenizer)
        streams = [SampleKey(seed, 0, str(index), 0).stream("quality") for index in range(len(searches))]
        pairs = zip(searches, streams, strict=True)
        return await asyncio.gather(*(simulation.reply(query, label, stream) for (query, label), stream in pairs))

    return asyncio.run(run())
