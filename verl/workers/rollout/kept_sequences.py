"""Keys and values of sequences that are not running: sessions between turns and prompts of groups."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from verl.agent_loop.trajectory import TokenIds
from verl.workers.rollout.kv_cache import KeptKV


@dataclass(frozen=True, slots=True)
class KeptSequence:
    """``kv`` holds the positions of ``ids``."""

    ids: TokenIds
    kv: KeptKV


class KeptSequences:
    """What is kept, least recently used first out. Losing an entry costs time, never a different result."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, KeptSequence] = OrderedDict()
        self._prompts: OrderedDict[TokenIds, KeptSequence] = OrderedDict()
        self.positions = 0

    def take_session(self, session: str) -> KeptSequence | None:
        kept = self._sessions.pop(session, None)
        self.positions -= kept.kv.length if kept else 0
        return kept

    def keep_session(self, session: str, kept: KeptSequence) -> None:
        self.take_session(session)
        self._sessions[session] = kept
        self.positions += kept.kv.length

    def prompt(self, ids: TokenIds) -> KeptSequence | None:
        kept = self._prompts.get(ids)
        if kept:
            self._prompts.move_to_end(ids)
        return kept

    def keep_prompt(self, kept: KeptSequence) -> None:
        if kept.ids not in self._prompts:
            self._prompts[kept.ids] = kept
            self.positions += kept.kv.length

    def shrink(self, limit: int) -> None:
        """Forgets prompts, then sessions, until at most ``limit`` positions are kept."""
        while self.positions > limit and self._prompts:
            self.positions -= self._prompts.popitem(last=False)[1].kv.length
        while self.positions > limit and self._sessions:
            self.positions -= self._sessions.popitem(last=False)[1].kv.length

    def clear(self) -> None:
        self._sessions.clear()
        self._prompts.clear()
        self.positions = 0
