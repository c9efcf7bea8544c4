"""An OpenAI-compatible server for a simulation LLM on the torch engine, in one process.

``python -m zerosearch.simulation.server --model PATH``. Answers to requests with a ``seed`` are a
function of model, body and seed: not of the server's load. A request without one is random.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from aiohttp import web
from transformers import AutoConfig, PreTrainedTokenizerBase

from verl.utils.tokenizer import eos_token_ids, hf_tokenizer
from verl.workers.rollout.engine import (
    Generation,
    GenerationRequest,
    InfrastructureError,
    SamplingParams,
    StopReason,
)
from verl.workers.rollout.torch_engine import TorchEngine
from zerosearch.simulation.openai_protocol import (
    ApiError,
    Body,
    ChatBody,
    Choice,
    CompletionBody,
    Message,
    chat_reply,
    completion_reply,
    error_body,
    model_list,
    parse_body,
)

_DEFAULT_COMPLETION_TOKENS = 16
_DEFAULT_MODEL_LEN = 4096
_MAX_BODY_BYTES = 16 << 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PromptEncoder:
    """Chats and texts to ids.

    A chat is rendered by the tokenizer's template and read at once, as Hugging Face does. Where a
    message contains the text of a special token, messages are read apart from the template around
    them, with special tokens off, so that no message can forge a turn. Text prompts are read as they
    stand, special tokens included.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = tuple(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Raises ApiError when the model has no template or the template refuses the chat."""
        if not self._tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template; use /v1/completions")
        if not any(special in message.text for message in messages for special in self._special):
            return self._ids(self._render([message.text for message in messages], messages))
        # Noncharacters of Unicode: no text holds them, and templates do not strip them.
        marks = [f"\ufdd0{index}\ufdd1" for index in range(len(messages))]
        text = self._render(marks, messages)
        ids: list[int] = []
        for mark, message in zip(marks, messages, strict=True):
            before, found, text = text.partition(mark)
            ids += self._ids(before)
            ids += self._ids(message.text, split_special_tokens=True) if found else ()
        return (*ids, *self._ids(text))

    def text(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        return tuple(self._tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else tuple(prompt)

    def _render(self, contents: Sequence[str], messages: Sequence[Message]) -> str:
        chat = [{"role": m.role, "content": content} for m, content in zip(messages, contents, strict=True)]
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str, split_special_tokens: bool = False) -> tuple[int, ...]:
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens)
        return tuple(encoded["input_ids"])


class CompletionServer:
    """The routes of one served model."""

    def __init__(self, engine: TorchEngine, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
        self._engine, self._tokenizer, self._model = engine, tokenizer, model
        self._encoder = PromptEncoder(tokenizer)
        self._created = int(time.time())

    def application(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_json], client_max_size=_MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(model_list(self._model, self._engine.max_model_len, self._created))

    async def _chat(self, request: web.Request) -> web.Response:
        body = parse_body(ChatBody, await _json(request))
        self._check_model(body)
        context = self._encoder.chat(body.messages)
        choices = await self._answers(self._requests(body, context, body.max_completion_tokens or body.max_tokens))
        return web.json_response(chat_reply(self._model, choices, len(context)))

    async def _complete(self, request: web.Request) -> web.Response:
        body = parse_body(CompletionBody, await _json(request))
        self._check_model(body)
        contexts = [self._encoder.text(prompt) for prompt in body.prompts]
        max_tokens = body.max_tokens or _DEFAULT_COMPLETION_TOKENS
        requests = [r for context in contexts for r in self._requests(body, context, max_tokens)]
        choices = await self._answers(requests)
        return web.json_response(completion_reply(self._model, choices, sum(map(len, contexts))))

    def _check_model(self, body: Body) -> None:
        if body.model not in ("", self._model):
            message = f"the model {body.model!r} does not exist; this server has {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _requests(self, body: Body, context: tuple[int, ...], max_tokens: int | None) -> list[GenerationRequest]:
        """``n`` requests for one prompt. Raises ApiError for a context or length that does not fit."""
        limit = self._engine.max_model_len
        if not context or len(context) + (max_tokens or 1) > limit:
            message = f"the model's context is {limit} tokens; asked for {len(context)} and {max_tokens or 1} more"
            raise ApiError(400, message, code="context_length_exceeded")
        sampling = SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            max_tokens=max_tokens or limit - len(context),
            stop=body.stop_strings,
        )
        seed = secrets.randbits(64) if body.seed is None else body.seed
        return [
            GenerationRequest(f"http/{secrets.token_hex(8)}", context, sampling, _stream(seed, index))
            for index in range(body.n)
        ]

    async def _answers(self, requests: Sequence[GenerationRequest]) -> list[Choice]:
        return list(await asyncio.gather(*(self._choice(request) for request in requests)))

    async def _choice(self, request: GenerationRequest) -> Choice:
        try:
            generation = await self._engine.generate(request)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        await self._engine.release(request.session)
        reason = "length" if generation.stop_reason is StopReason.LENGTH else "stop"
        return Choice(self._text(generation), reason, len(generation.token_ids))

    def _text(self, generation: Generation) -> str:
        """Decoded without special tokens, up to the stop string."""
        text = str(
            self._tokenizer.decode(
                list(generation.token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
        return text.partition(generation.stop_string)[0] if generation.stop_string else text


def _stream(seed: int, index: int) -> int:
    """The 64-bit random stream of choice ``index`` of a request."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body(), status=error.status)
    except web.HTTPException as error:
        return web.json_response(
            error_body(error.status, f"{request.method} {request.path}: {error.reason}"), status=error.status
        )
    except InfrastructureError as error:
        return web.json_response(error_body(503, str(error)), status=503)


async def serve(app: web.Application, host: str, port: int, model: str) -> None:
    """Serves until SIGTERM or SIGINT; once it listens, prints one line of JSON with ``url`` and ``model``."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # A client that goes away frees its slot.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=1024).start()
    url = f"http://{host}:{runner.addresses[0][1]}/v1"
    print(json.dumps({"url": url, "model": model}), flush=True)
    await stop.wait()
    await runner.cleanup()


def _exit_with_stdin() -> None:
    """Ends this process when the other end of stdin is closed, be it by the parent's death."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zerosearch.simulation.server", description=__doc__)
    parser.add_argument("--model", required=True, help="directory or name of a Llama, Qwen2 or Qwen3 model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--served-model-name", help="name clients ask for (default: --model)")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="requests that run at once; others queue")
    parser.add_argument("--max-model-len", type=int, help="tokens of prompt and answer (default: at most 4096)")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when stdin reaches its end")
    return parser.parse_args(argv)


def _longest(model: str) -> int:
    length: int = AutoConfig.from_pretrained(model).max_position_embeddings
    return length


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    if args.exit_with_stdin:
        _exit_with_stdin()
    tokenizer = hf_tokenizer(args.model)
    engine = TorchEngine(
        args.model,
        tokenizer,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len or min(_longest(args.model), _DEFAULT_MODEL_LEN),
        dtype=_DTYPES[args.dtype],
        eos_token_ids=eos_token_ids(args.model, tokenizer),
        device=args.device,
    )
    name = args.served_model_name or args.model
    asyncio.run(serve(CompletionServer(engine, tokenizer, name).application(), args.host, args.port, name))


if __name__ == "__main__":
    main()
