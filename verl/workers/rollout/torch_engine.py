"""A rollout engine in plain torch: continuous batching whose results do not depend on the batch.

A request's tokens and log-probabilities are a function of its context, its stream, its sampling
parameters and the weights, bit for bit: not of the other requests, of the order of arrival, of what
was cached or forgotten, nor of the number of slots. `torch_model` and `attention` say how. The scope
is one machine with one number of torch threads, that at the engine's making.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from verl.agent_loop.trajectory import TokenIds
from verl.workers.rollout.attention import BatchAttention, Span
from verl.workers.rollout.engine import Generation, GenerationRequest, InfrastructureError, NamedTensor, StopReason
from verl.workers.rollout.kept_sequences import KeptSequence, KeptSequences
from verl.workers.rollout.kv_cache import CacheRow, KVCache
from verl.workers.rollout.sampling import RowSampling, sample
from verl.workers.rollout.serving_gate import ServingGate
from verl.workers.rollout.stop import StopFinder, StopStrings
from verl.workers.rollout.torch_model import DecoderModel
from verl.workers.rollout.weight_loader import WeightLoader

PREFILL_TOKENS = 2048
"""A step that has taken in this many new context tokens takes no further request."""

LOOP_TURNS = 4
"""Turns of the event loop between steps: an HTTP answer passes through about as many callbacks."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Since the start: tokens computed from contexts, tokens sampled, context tokens found cached, seconds in steps."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    reused_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0


@dataclass(eq=False, slots=True)
class _Sequence:
    """A request in the engine. ``ids`` is the context and what was generated; ``limit`` its greatest length."""

    request: GenerationRequest
    stop: StopStrings
    limit: int
    done: asyncio.Future[Generation]
    ids: list[int]
    log_probs: list[float] = field(default_factory=list)
    row: CacheRow | None = None
    fresh: bool = False

    @property
    def session(self) -> str:
        return self.request.session

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are not computed yet."""
        assert self.row is not None
        return len(self.ids) - self.row.length

    @property
    def generated(self) -> list[int]:
        return self.ids[len(self.request.token_ids) :]


class TorchEngine:
    """Implements `RolloutEngine` and `WeightReceiver` for Llama, Qwen2 and Qwen3 models.

    At most ``max_num_seqs`` requests run at once, others queue. Keys and values of running and
    idle sessions together take at most ``max_num_seqs * max_model_len`` positions: idle ones are
    forgotten, longest unused first, and computed again when needed. All methods belong to one
    event loop; steps run in it, between other callbacks.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
        eos_token_ids: Iterable[int] = (),
        device: str | torch.device = "cpu",
    ) -> None:
        """``max_model_len`` counts context and generated tokens. Raises ValueError for a model it cannot run."""
        source = model
        if not isinstance(source, PreTrainedModel):
            source = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        allowed = source.config.max_position_embeddings
        if not 1 < max_model_len <= allowed or max_num_seqs < 1:
            raise ValueError(f"need max_num_seqs >= 1 and 1 < max_model_len <= {allowed}, the model's limit")
        self._model = DecoderModel(source.config, max_model_len, dtype, torch.device(device))
        loader = WeightLoader(self._model, version=0)
        loader.load(source.state_dict().items())
        loader.finish()
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self._eos = frozenset(eos_token_ids)
        self._finder = StopFinder(tokenizer, self._model.spec.vocab_size)
        self._cache = KVCache(self._model.spec, max_model_len, self._model.device)
        self._kept = KeptSequences()
        self._gate = ServingGate()
        self._loader: WeightLoader | None = None
        self._version = 0
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[CacheRow, _Sequence] = {}
        self._lingering: dict[str, _Sequence] = {}
        self._task: asyncio.Task[None] | None = None
        self._stats = EngineStats()

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def weights_version(self) -> int:
        """The version of the last complete weights; 0 for those of the start."""
        return self._version

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raises ValueError for a context that cannot fit and InfrastructureError when the engine is out of order.

        Cancelling the call frees the request's place at once.
        """
        self._validate(request)
        stop = self._finder.prepare(request.sampling.stop)
        await self._gate.enter()
        limit = min(len(request.token_ids) + request.sampling.max_tokens, self.max_model_len)
        done: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        sequence = _Sequence(request, stop, limit, done, list(request.token_ids))
        self._waiting.append(sequence)
        self._start()
        try:
            return await done
        finally:
            self._withdraw(sequence)

    def _validate(self, request: GenerationRequest) -> None:
        n, vocab = len(request.token_ids), self._model.spec.vocab_size
        if not 0 < n < self.max_model_len:
            raise ValueError(f"a context of {n} tokens cannot be continued within max_model_len {self.max_model_len}")
        if min(request.token_ids) < 0 or max(request.token_ids) >= vocab:
            raise ValueError(f"token ids must lie in 0..{vocab - 1}")
        if not 0 <= request.stream < 1 << 64:
            raise ValueError(f"a stream is a 64-bit number, got {request.stream}")

    def _withdraw(self, sequence: _Sequence) -> None:
        """Forgets a request whose caller was cancelled; one that is finished is in neither place."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.row is not None and self._running.get(sequence.row) is sequence:
            del self._running[sequence.row]
            with torch.inference_mode():
                sequence.row.pool.remove(sequence.row)

    async def release(self, session: str) -> None:
        """Frees what is kept of an idle session."""
        self._drop_lingering(session)
        self._kept.take_session(session)

    async def begin_weights(self, version: int) -> None:
        """Waits for requests in flight, drops every cached key and value, opens version ``version``."""
        self._gate.close()
        self._loader = None
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        self._forget_all()
        self._loader = WeightLoader(self._model, version)

    async def load_weights(self, bucket: Iterable[NamedTensor]) -> None:
        """One bucket of (Hugging Face name, full tensor). Raises InfrastructureError outside a sync."""
        if self._loader is None:
            raise InfrastructureError("weights came before begin_weights")
        self._loader.load(bucket)

    async def end_weights(self, version: int) -> None:
        """Serves again. Raises InfrastructureError unless every tensor of the model arrived exactly once."""
        loader, self._loader = self._loader, None
        try:
            if loader is None or loader.version != version:
                raise InfrastructureError(f"weights of version {version} ended but had not begun")
            loader.finish()
        except InfrastructureError as error:
            self._gate.fail(error)
            raise
        self._version = version
        self._gate.open()

    def _forget_all(self) -> None:
        self._running.clear()
        self._lingering.clear()
        self._kept.clear()
        self._cache.clear()

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._stopped)

    async def _run(self) -> None:
        while self._waiting or self._running or self._lingering:
            self._step()
            for _ in range(LOOP_TURNS):
                await asyncio.sleep(0)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """A step that failed takes every request with it and leaves the engine broken until new weights.

        A cancelled task (its event loop is closing) takes the requests only.
        """
        cause = None if task.cancelled() else task.exception()
        if cause is None and not task.cancelled():
            return
        lost = [*self._waiting, *self._running.values()]
        self._waiting.clear()
        self._forget_all()
        if cause is not None:
            self._gate.fail(cause)
        for sequence in lost:
            if not sequence.done.done():
                error = InfrastructureError(
                    f"a step of the engine failed: {cause!r}" if cause else "the engine stopped"
                )
                error.__cause__ = cause
                sequence.done.set_exception(error)

    @torch.inference_mode()
    def _step(self) -> None:
        started = perf_counter()
        reused, prefill = self._admit()
        self._keep_lingering()
        for row, sequence in self._running.items():
            self._cache.grow(row, len(sequence.ids))
        decoded = len(self._running)
        if self._running:
            self._advance()
        self._kept.shrink(self.max_num_seqs * self.max_model_len - self._cache.positions)
        self._stats = EngineStats(
            prefill_tokens=self._stats.prefill_tokens + prefill,
            decode_tokens=self._stats.decode_tokens + decoded,
            reused_tokens=self._stats.reused_tokens + reused,
            steps=self._stats.steps + 1,
            busy_seconds=self._stats.busy_seconds + perf_counter() - started,
        )

    def _admit(self) -> tuple[int, int]:
        """Places waiting requests. Returns how many context tokens were cached and how many are to be computed."""
        reused = prefill = 0
        prompts: set[TokenIds] = set()
        postponed: list[_Sequence] = []
        while self._waiting and len(self._running) < self.max_num_seqs and prefill < PREFILL_TOKENS:
            sequence = self._waiting.popleft()
            if sequence.request.token_ids in prompts:
                # Computed in this step for another request of the group; the next step copies it.
                postponed.append(sequence)
                continue
            sequence.row = self._resumed(sequence) or self._copied(sequence)
            if sequence.row is None:
                sequence.row = self._cache.new_row(len(sequence.ids))
                sequence.fresh = True
                prompts.add(sequence.request.token_ids)
            self._running[sequence.row] = sequence
            reused += sequence.row.length
            prefill += sequence.pending
        self._waiting.extendleft(reversed(postponed))
        return reused, prefill

    def _resumed(self, sequence: _Sequence) -> CacheRow | None:
        """A row with what is cached of the request's session, if that begins its context."""
        most = len(sequence.ids) - 1
        lingering = self._lingering.pop(sequence.session, None)
        if lingering is not None and lingering.row is not None:
            row, usable = lingering.row, min(lingering.row.length, most)
            if lingering.ids[:usable] == sequence.ids[:usable]:
                row.length = usable
                return row
            row.pool.remove(row)
            return None
        kept = self._kept.take_session(sequence.session)
        usable = min(len(kept.ids), most) if kept else 0
        if kept is None or list(kept.ids[:usable]) != sequence.ids[:usable]:
            return None
        return self._cache.restore(kept.kv, usable, len(sequence.ids))

    def _copied(self, sequence: _Sequence) -> CacheRow | None:
        """A row with the same prompt of another request; its last token is computed for its logits."""
        kept = self._kept.prompt(sequence.request.token_ids)
        return self._cache.restore(kept.kv, len(sequence.ids) - 1, len(sequence.ids)) if kept else None

    def _keep_lingering(self) -> None:
        """Moves what belongs to finished requests out of the pools, unless released or resumed since."""
        for session, sequence in self._lingering.items():
            row = sequence.row
            assert row is not None
            ids = tuple(sequence.ids[: row.length])
            self._kept.keep_session(session, KeptSequence(ids, row.pool.kept(row, row.length)))
            row.pool.remove(row)
        self._lingering.clear()

    def _advance(self) -> None:
        """One token for every running request: the rest of its context is computed and its next token sampled."""
        rows = self._cache.rows()
        sequences = [self._running[row] for row in rows]
        tokens = [s.ids[row.length] for s, row in zip(sequences, rows, strict=True)]
        positions = [row.length for row in rows]
        last = list(range(len(rows)))
        spans: list[Span] = []
        for index, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            first, count = row.length + 1, sequence.pending - 1
            if count:
                spans.append(Span(row, first, count, start=len(tokens)))
                tokens.extend(sequence.ids[first:])
                positions.extend(range(first, first + count))
                last[index] = len(tokens) - 1
        attention = BatchAttention(self._cache, self._model.spec, spans)
        hidden = self._model.forward(self._padded(tokens), self._padded(positions), attention)
        logits = self._model.logits(hidden[last] if spans else hidden[: len(rows)])
        self._keep_prompts(sequences)
        self._commit(sequences, *sample(logits, _row_sampling(sequences)))

    def _padded(self, values: list[int]) -> torch.Tensor:
        padded = np.zeros(self._model.tiling.padded(len(values)), dtype=np.int64)
        padded[: len(values)] = values
        return torch.from_numpy(padded).to(self._model.device)

    def _keep_prompts(self, sequences: list[_Sequence]) -> None:
        for sequence in sequences:
            row = sequence.row
            assert row is not None
            row.length = len(sequence.ids)
            if sequence.fresh:
                sequence.fresh = False
                self._kept.keep_prompt(KeptSequence(sequence.request.token_ids, row.pool.kept(row, row.length)))

    def _commit(self, sequences: list[_Sequence], tokens: np.ndarray, log_probs: np.ndarray) -> None:
        if not np.isfinite(log_probs).all():
            raise InfrastructureError("the model's logits are not finite")
        for sequence, token, log_prob in zip(sequences, tokens.tolist(), log_probs.tolist(), strict=True):
            sequence.ids.append(token)
            sequence.log_probs.append(log_prob)
            if token in self._eos:
                self._finish(sequence, StopReason.END_OF_SEQUENCE, None)
                continue
            found = self._finder.find(sequence.generated, sequence.stop) if sequence.stop.watched[token] else None
            if found is not None:
                self._finish(sequence, StopReason.STOP_STRING, found)
            elif len(sequence.ids) >= sequence.limit:
                self._finish(sequence, StopReason.LENGTH, None)

    def _finish(self, sequence: _Sequence, reason: StopReason, stop_string: str | None) -> None:
        assert sequence.row is not None
        del self._running[sequence.row]
        self._drop_lingering(sequence.session)
        self._lingering[sequence.session] = sequence
        ids = tuple(sequence.generated)
        generation = Generation(ids, tuple(sequence.log_probs), reason, stop_string, ((self._version, len(ids)),))
        if not sequence.done.done():
            sequence.done.set_result(generation)

    @torch.inference_mode()
    def _drop_lingering(self, session: str) -> None:
        sequence = self._lingering.pop(session, None)
        if sequence is not None and sequence.row is not None:
            sequence.row.pool.remove(sequence.row)


def _row_sampling(sequences: list[_Sequence]) -> RowSampling:
    requests = [s.request for s in sequences]
    return RowSampling(
        streams=np.array([r.stream for r in requests], dtype=np.uint64),
        positions=np.array([len(s.ids) for s in sequences], dtype=np.int64),
        temperatures=np.array([r.sampling.temperature for r in requests], dtype=np.float32),
        top_ps=np.array([r.sampling.top_p for r in requests], dtype=np.float32),
    )
