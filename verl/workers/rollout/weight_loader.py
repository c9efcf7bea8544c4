"""One pass of weights into a model: every tensor exactly once, in its shape."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from verl.workers.rollout.engine import InfrastructureError, NamedTensor
from verl.workers.rollout.torch_model import EMBEDDING_NAME, HEAD_NAME, DecoderModel


class WeightLoader:
    """Copies tensors as they come and remembers what was wrong with them.

    A model with tied embeddings may be sent its head as well; the embedding's tensor counts.
    """

    def __init__(self, model: DecoderModel, version: int) -> None:
        self.version = version
        self._targets = model.parameters()
        self._optional = {HEAD_NAME: self._targets[EMBEDDING_NAME].shape} if model.spec.tied else {}
        self._seen: set[str] = set()
        self._problems: list[str] = []

    @torch.inference_mode()
    def load(self, bucket: Iterable[NamedTensor]) -> None:
        for name, tensor in bucket:
            problem = self._problem(name, tensor)
            self._seen.add(name)
            if problem:
                self._problems.append(problem)
            elif name in self._targets:
                self._targets[name].copy_(tensor)

    def _problem(self, name: str, tensor: torch.Tensor) -> str | None:
        target = self._targets[name].shape if name in self._targets else self._optional.get(name)
        if target is None:
            return f"{name} is not a tensor of the model"
        if name in self._seen:
            return f"{name} came twice"
        if tensor.shape != target:
            return f"{name} has shape {tuple(tensor.shape)}, not {tuple(target)}"
        return None

    def finish(self) -> None:
        """Raises InfrastructureError unless the model is complete."""
        missing = [f"{name} is missing" for name in self._targets if name not in self._seen]
        problems = self._problems + missing
        if problems:
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            raise InfrastructureError(f"weights of version {self.version} are not complete: {shown}")
