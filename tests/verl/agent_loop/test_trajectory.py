from __future__ import annotations

import pytest

from verl.agent_loop.trajectory import Segment, SegmentKind, Trajectory


def policy(ids: tuple[int, ...], version: int = 0) -> Segment:
    log_probs = tuple(-0.5 - i for i in range(len(ids)))
    return Segment(SegmentKind.POLICY, ids, log_probs, ((version, len(ids)),))


def observation(ids: tuple[int, ...]) -> Segment:
    return Segment(SegmentKind.OBSERVATION, ids, info={"anything": 1})


def test_mask_ids_and_log_probs_come_from_segments() -> None:
    t = Trajectory("u", 0, 1, "train", (1, 2), [policy((3, 4)), observation((5,)), policy((6,))])
    assert t.context_ids == (1, 2, 3, 4, 5, 6)
    assert t.response_ids == (3, 4, 5, 6)
    assert t.response_mask == (1, 1, 0, 1)
    assert t.response_log_probs == (-0.5, -1.5, 0.0, -0.5)
    assert (t.policy_tokens, t.observation_tokens) == (3, 1)


def test_policy_tokens_without_log_probabilities_are_refused() -> None:
    with pytest.raises(AssertionError, match="log-probability"):
        Segment(SegmentKind.POLICY, (1, 2), (-0.1,), ((0, 2),))
