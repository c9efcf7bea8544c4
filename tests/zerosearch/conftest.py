"""A small byte-level BPE tokenizer whose merges cross tag borders, and a scripted simulation server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl.workers.rollout.engine import Generation, GenerationRequest, StopReason

_CORPUS = [
    "<search>capital of France</search>\n\n<information>Doc 1: Paris is the capital.</information>\n\n",
    "<think>I know.</think><answer>Paris</answer>\n<think>so</think>\n<search>who?</search>>",
    "query</search>></answer>>> x></search>.\n</answer>.\n",
] * 40


@pytest.fixture(scope="session")
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Trained without a pre-tokenizer's borders, so that "></", ">." and ">\\n" become single tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
        max_token_length=6,
    )
    core.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


@dataclass
class Reply:
    """One scripted reply of the fake server. ``body`` bytes are sent as they are."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0


class FakeChatServer:
    """An OpenAI-compatible server on a real port: plays ``script`` first, then answers with ``answer``."""

    def __init__(self) -> None:
        self.models: list[str] = ["sim"]
        self.script: list[Reply] = []
        self.models_script: list[Reply] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.model_requests = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.delay = 0.0
        self.hung = False
        self.paths: list[str] = []
        self.refusal: Callable[[web.Request, dict[str, Any]], Reply | None] = lambda _, __: None
        self.answer: Callable[[dict[str, Any]], str | None] = lambda _: "Doc 1: nothing"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._gate])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._list_models)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        self.url = f"http://{self.address}/v1"

    async def stop(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _gate(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Silence while ``hung``, connections open; then ``refusal``'s reply, where it has one, comes first."""
        self.paths.append(request.path)
        while self.hung:
            await asyncio.sleep(0.01)
        body = await request.json() if request.method == "POST" else {}
        refused = self.refusal(request, body)
        return await handler(request) if refused is None else await self._play(refused)

    async def _list_models(self, _: web.Request) -> web.Response:
        self.model_requests += 1
        if self.models_script:
            return await self._play(self.models_script.pop(0))
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.script:
                return await self._play(self.script.pop(0))
            await asyncio.sleep(self.delay)
            return web.json_response(completion(self.answer(body)))
        finally:
            self.in_flight -= 1

    @staticmethod
    async def _play(reply: Reply) -> web.Response:
        await asyncio.sleep(reply.delay)
        if isinstance(reply.body, bytes):
            return web.Response(status=reply.status, body=reply.body, headers=reply.headers)
        return web.json_response(reply.body, status=reply.status, headers=reply.headers)


def completion(text: str | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


@pytest.fixture
async def chat_servers() -> AsyncIterator[Callable[[], Awaitable[FakeChatServer]]]:
    """Starts fake servers on demand and stops them all at the end."""
    started: list[FakeChatServer] = []

    async def start() -> FakeChatServer:
        server = FakeChatServer()
        await server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        await server.stop()


@pytest.fixture
async def chat_server(chat_servers: Callable[[], Awaitable[FakeChatServer]]) -> FakeChatServer:
    return await chat_servers()


@pytest.fixture
def reply() -> type[Reply]:
    return Reply


@pytest.fixture
def dead_address() -> str:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class ScriptedEngine:
    """An engine whose policy says given texts, one per generation, and stops as a real one does.

    A generation goes on where the last one stopped when its context shows no observation between.
    A text that runs out ends with the end-of-sequence id. ``weights_version`` counts requests.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self._rest: list[int] = []
        self._seen: tuple[int, ...] = ()
        self.requests: list[GenerationRequest] = []
        self.generations: list[Generation] = []
        self.released: list[str] = []
        self.failure: Exception | None = None

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        if not (self._seen and request.token_ids == self._seen):
            text = self._texts.pop(0)
            self._rest = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
        ids, reason, stop = self._sample(request)
        self._rest = self._rest[len(ids) :]
        self._seen = request.token_ids + tuple(ids)
        log_probs = tuple(-0.01 * (len(request.token_ids) + i) for i in range(len(ids)))
        versions = ((len(self.requests), len(ids)),)
        self.generations.append(Generation(tuple(ids), log_probs, reason, stop, versions))
        return self.generations[-1]

    def _sample(self, request: GenerationRequest) -> tuple[list[int], StopReason, str | None]:
        ids: list[int] = []
        for token in self._rest[: request.sampling.max_tokens]:
            ids.append(token)
            text = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for stop in request.sampling.stop:
                if stop in text:
                    return ids, StopReason.STOP_STRING, stop
            if token == self._tokenizer.eos_token_id:
                return ids, StopReason.END_OF_SEQUENCE, None
        return ids, StopReason.LENGTH, None

    async def release(self, session: str) -> None:
        self.released.append(session)


@pytest.fixture
def make_engine(bpe_tokenizer: PreTrainedTokenizerFast) -> Callable[..., ScriptedEngine]:
    return lambda *texts: ScriptedEngine(bpe_tokenizer, texts)
