"""The training engine: a token scorer on a mesh of ranks, fed with ragged rows.

Invariants: the gradient equals that of one process looping over the rows, for any number of ranks
and any split into micro-batches; every rank enters every collective, whatever rows it holds; an
update whose loss or gradient is not finite changes nothing on any rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl.workers.config import FSDPConfig, ModelConfig, OptimConfig
from verl.workers.engine.guard import NonFiniteGuard
from verl.workers.engine.loss import BatchTotals, Metric, MetricKind, combine_metrics
from verl.workers.engine.optimizer import build_optimizer, clip_grad_norm
from verl.workers.engine.packing import MicroBatch, dummy_row, micro_batch_indices, pack
from verl.workers.engine.rows import Row
from verl.workers.engine.scorer import LossT, ScorerFactory
from verl.workers.engine.sharding import build_sharded, full_tensors, reshard, sharded_modules


class TrainableConfig(Protocol):
    """What the configurations of all trained models have."""

    @property
    def ppo_max_token_len_per_gpu(self) -> int: ...

    @property
    def grad_clip(self) -> float: ...

    @property
    def max_nonfinite_updates(self) -> int: ...

    @property
    def optim(self) -> OptimConfig: ...

    @property
    def fsdp_config(self) -> FSDPConfig: ...


class FSDPEngine(Generic[LossT]):
    """A frozen model that scores rows. ``mesh`` is 1-D; construction is collective."""

    trainable = False

    def __init__(
        self,
        model: ModelConfig,
        fsdp: FSDPConfig,
        mesh: DeviceMesh,
        scorer_of: ScorerFactory[LossT],
        max_tokens: int,
    ) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.device = torch.device(mesh.device_type)
        self.max_tokens = max_tokens
        self.scorer = build_sharded(model, fsdp, mesh, scorer_of, self.trainable)

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Scores of each row's response tokens, in the order of ``rows``, which may be empty. Collective.

        Each is (k, response_length) float32 on CPU, 0 on untrained tokens, with the scorer's k scores per token.
        """
        scores = [torch.zeros(self.scorer.scores_per_token, row.response_length) for row in rows]
        parts = micro_batch_indices(rows, self.max_tokens)
        for k in range(self._agree_on_maximum(len(parts))):
            if k < len(parts):
                batch = pack([rows[i] for i in parts[k]], self.device)
                values = torch.stack(self.scorer.scores(batch), dim=1).cpu()
                for i, value in zip(parts[k], values, strict=True):
                    scores[i] = value[:, : rows[i].response_length]
            else:
                self.scorer.scores(pack([dummy_row()], self.device))
        reshard(self.scorer)
        return scores

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :func:`full_tensors`. Collective: all ranks iterate to the end."""
        return full_tensors(self.scorer)

    def _agree_on_maximum(self, count: int) -> int:
        agreed = torch.tensor(count, device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, self.group)
        return int(agreed)


class TrainableFSDPEngine(FSDPEngine[LossT]):
    """Adds float32 masters, AdamW and the guard against updates that are not finite."""

    trainable = True

    def __init__(
        self,
        model: ModelConfig,
        config: TrainableConfig,
        mesh: DeviceMesh,
        scorer_of: ScorerFactory[LossT],
        dump_directory: Path,
    ) -> None:
        super().__init__(model, config.fsdp_config, mesh, scorer_of, config.ppo_max_token_len_per_gpu)
        self.config = config
        self.parameters = list(self.scorer.parameters())
        self.optimizer = build_optimizer(self.parameters, config.optim)
        self.guard = NonFiniteGuard(config.max_nonfinite_updates, dump_directory, mesh.get_rank())

    def train_batch(self, rows: Sequence[Row], loss: LossT, learning_rate: float) -> dict[str, float]:
        """One optimizer step on the rows of all ranks. Returns the loss's metrics, equal on every rank.

        Added are ``loss``, ``grad_norm`` (before clipping), ``lr``, ``tokens`` (trained) and
        ``nonfinite_updates`` (skipped so far). Collective; a rank may have no rows. Raises ValueError
        if no rank has a trained token, NonFiniteTrainingError after too many skipped updates in a row.
        """
        metrics = self.backward(rows, loss)
        norm = clip_grad_norm(self.parameters, self.config.grad_clip, self.group)
        finite = math.isfinite(metrics["loss"]) and math.isfinite(norm)
        if finite:
            self.optimizer.param_groups[0]["lr"] = learning_rate
            self.optimizer.step()
            self.guard.applied()
        self.optimizer.zero_grad()
        if not finite:
            self.guard.skip(rows, metrics["loss"], norm)
        return {**metrics, "grad_norm": norm, "lr": learning_rate, "nonfinite_updates": float(self.guard.skipped)}

    def backward(self, rows: Sequence[Row], loss: LossT) -> dict[str, float]:
        """Leaves the gradient of the whole batch's loss in the parameters, sharded. Collective."""
        parts = micro_batch_indices(rows, self.max_tokens)
        totals = self._totals(rows)
        rounds = self._agree_on_maximum(len(parts))
        metrics: list[Mapping[str, Metric]] = []
        for k in range(rounds):
            self._prepare_backward(is_last=k == rounds - 1)
            if k < len(parts):
                metrics.append(self._backward_part(pack([rows[i] for i in parts[k]], self.device), loss, totals))
            else:
                self._backward_dummy()
        return {**self._combine(metrics), "tokens": float(totals.tokens)}

    def _totals(self, rows: Sequence[Row]) -> BatchTotals:
        trained = [row.trained_tokens for row in rows]
        counts = torch.tensor([sum(trained), sum(map(bool, trained))], device=self.device)
        dist.all_reduce(counts, group=self.group)
        totals = BatchTotals(*counts.tolist())
        if not totals.tokens:
            raise ValueError("the batch has no trained token on any rank")
        return totals

    def _prepare_backward(self, is_last: bool) -> None:
        """Without resharding after forward memory is plentiful: gradients too stay whole until the last micro-batch."""
        if not self.config.fsdp_config.reshard_after_forward:
            for module in sharded_modules(self.scorer):
                module.set_requires_gradient_sync(is_last, recurse=False)

    def _backward_part(self, batch: MicroBatch, loss: LossT, totals: BatchTotals) -> Mapping[str, Metric]:
        output = self.scorer.loss(loss, batch, totals)
        output.loss.backward()
        return {**output.metrics, "loss": Metric(MetricKind.SUM, output.loss.detach())}

    def _backward_dummy(self) -> None:
        (self.scorer.scores(pack([dummy_row()], self.device))[0].sum() * 0).backward()

    def _combine(self, metrics: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
        plain = [{name: Metric(m.kind, float(m.value), m.weight) for name, m in part.items()} for part in metrics]
        ranks: list[list[dict[str, Metric]]] = [[]] * self.mesh.size()
        dist.all_gather_object(ranks, plain, group=self.group)
        return combine_metrics(part for rank in ranks for part in rank)
