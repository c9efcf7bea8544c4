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
    """What is kept, least recently used first out. Losing an entry costs time, never a different result.

    A session is named by its string, a prompt by its ids.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[str | TokenIds, KeptSequence] = OrderedDict()
        self.positions = 0

    def take_session(self, session: str) -> KeptSequence | None:
        kept = self._entries.pop(session, None)
        self.positions -= kept.kv.length if kept else 0
        return kept

    def keep_session(self, session: str, kept: KeptSequence) -> None:
        self.take_session(session)
        self._add(session, kept)

    def prompt(self, ids: TokenIds) -> KeptSequence | None:
        kept = self._entries.get(ids)
        if kept:
            self._entries.move_to_end(ids)
        return kept

    def keep_prompt(self, kept: KeptSequence) -> None:
        if self.prompt(kept.ids) is None:
            self._add(kept.ids, kept)

    def _add(self, key: str | TokenIds, kept: KeptSequence) -> None:
        self._entries[key] = kept
        self.positions += kept.kv.length

    def shrink(self, limit: int) -> None:
        """Forgets until at most ``limit`` positions are kept."""
        while self.positions > max(limit, 0):
            _, kept = self._entries.popitem(last=False)
            self.positions -= kept.kv.length

    def clear(self) -> None:
        self._entries.clear()
        self.positions = 0
