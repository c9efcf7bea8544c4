"""What happens to an update whose loss or gradient is not finite: skipped, counted, kept for inspection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from verl.workers.engine.rows import Row


class NonFiniteTrainingError(RuntimeError):
    """Too many updates in a row had a loss or gradient that is not finite."""


class NonFiniteGuard:
    """Counts skipped updates. Every rank sees the same sequence, so every rank stops together."""

    def __init__(self, max_in_a_row: int, directory: Path, rank: int) -> None:
        self.skipped = 0
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0
        self._directory = directory
        self._rank = rank

    def applied(self) -> None:
        self._in_a_row = 0

    def skip(self, rows: Sequence[Row], loss: float, grad_norm: float) -> None:
        """Writes this rank's rows to ``directory``; raises NonFiniteTrainingError after too many in a row."""
        self.skipped += 1
        self._in_a_row += 1
        path = self._directory / f"nonfinite_{self.skipped:04d}_rank{self._rank}.safetensors"
        if rows:
            self._directory.mkdir(parents=True, exist_ok=True)
            save_file(dump_rows(rows), path)
        if self._in_a_row >= self._max_in_a_row:
            raise NonFiniteTrainingError(
                f"{self._in_a_row} updates in a row were not finite (loss {loss}, gradient norm {grad_norm}); "
                f"their rows are in {self._directory}"
            )


def dump_rows(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Rows end to end: ``lengths`` and ``response_lengths`` (n,) tell where each begins."""
    return {
        "lengths": torch.tensor([row.length for row in rows]),
        "response_lengths": torch.tensor([row.response_length for row in rows]),
        "input_ids": torch.cat([row.input_ids for row in rows]),
        "response_mask": torch.cat([row.response_mask for row in rows]),
        **{key: torch.cat([row.fields[key] for row in rows]) for key in rows[0].fields},
    }
