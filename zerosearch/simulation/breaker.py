"""Whether one server is up: after failures in a row, as many as it has requests, it gets one probe at a time."""

from __future__ import annotations

from collections.abc import Callable

FAILURES_IN_A_ROW = 4
FIRST_PROBE_AFTER = 0.25
LONGEST_PROBE_WAIT = 4.0

Clock = Callable[[], float]
"""Seconds of a clock that only moves forward."""


class Breaker:
    """The circuit breaker of one server (Nygard, "Release It!", chapter 5).

    Up, it admits every request; down, one at a time, at growing distances. ``since`` is when the first
    of the present failures came, None after a success.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._probing = False
        self.succeed()

    def succeed(self) -> None:
        """The server answered: it is up."""
        self.down = False
        self.since: float | None = None
        self.last_failure = ""
        self._failures = 0
        self._probe_wait = FIRST_PROBE_AFTER
        self._next_probe = 0.0

    def fail(self, failure: str, in_flight: int) -> None:
        """The server did not answer, or not usably, one of the ``in_flight`` requests that it has.

        Errors come back faster than answers: failures in a row say little while more requests wait than
        failed, because these may yet be answered.
        """
        now = self._clock()
        self.since = now if self.since is None else self.since
        self.last_failure = failure
        self._failures += 1
        if not self.down and self._failures >= max(FAILURES_IN_A_ROW, in_flight):
            self.down = True
            self._next_probe = now + self._probe_wait

    @property
    def admits(self) -> bool:
        return not self.down or (not self._probing and self._clock() >= self._next_probe)

    def enter(self) -> bool:
        """A request begins; True where it is a probe, which must be given back with ``end_probe``."""
        assert self.admits
        self._probing = self._probing or self.down
        return self.down

    def end_probe(self) -> None:
        """A probe is over, whatever came of it."""
        self._probing = False
        if self.down:
            self._next_probe = self._clock() + self._probe_wait
            self._probe_wait = min(2 * self._probe_wait, LONGEST_PROBE_WAIT)
