"""What the policy reads that it did not write: its instruction and its observations."""

from __future__ import annotations

from collections.abc import Sequence

CORRECTIVE_MESSAGE = (
    "\n\nMy previous action is invalid. To search, I write the query between <search> and </search>. "
    "To answer, I write the answer between <answer> and </answer>. Let me try again.\n\n"
)


def render_information(documents: Sequence[str]) -> str:
    """The observation after a search; documents come without their ``Doc i: `` prefix."""
    listed = "\n".join(f"Doc {number}: {text}" for number, text in enumerate(documents, start=1))
    return f"\n\n<information>{listed}</information>\n\n"
