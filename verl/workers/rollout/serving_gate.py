"""Who may enter the engine: requests wait while weights stream in and fail while it is out of order."""

from __future__ import annotations

import asyncio

from verl.workers.rollout.engine import InfrastructureError


class ServingGate:
    """Open, closed (a weight sync is under way) or broken (until a later sync is complete)."""

    def __init__(self) -> None:
        self._open = True
        self._broken: BaseException | None = None
        self._waiting: list[asyncio.Future[None]] = []

    async def enter(self) -> None:
        """Returns when the engine serves. Raises InfrastructureError when it is or gets out of order."""
        while not self._open:
            if self._broken is not None:
                raise InfrastructureError(f"the engine is out of order: {self._broken}") from self._broken
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    def close(self) -> None:
        """A sync begins. Those who waited for an earlier, unfinished one fail."""
        if not self._open:
            self.fail(InfrastructureError("a new weight sync began before the last one had ended"))
        self._open, self._broken = False, None

    def open(self) -> None:
        self._open, self._broken = True, None
        for waiting in self._take_waiting():
            waiting.set_result(None)

    def fail(self, cause: BaseException) -> None:
        self._open, self._broken = False, cause
        for waiting in self._take_waiting():
            error = InfrastructureError(f"the engine is out of order: {cause}")
            error.__cause__ = cause
            waiting.set_exception(error)

    def _take_waiting(self) -> list[asyncio.Future[None]]:
        taken, self._waiting = self._waiting, []
        return [waiting for waiting in taken if not waiting.done()]
