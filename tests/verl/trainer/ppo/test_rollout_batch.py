from __future__ import annotations

from verl.agent_loop.trajectory import Segment, SegmentKind, Trajectory
from verl.trainer.ppo.rollout_batch import deal_by_length, to_data_proto

PAD = 0


def trajectory(uid: str, prompt: tuple[int, ...], segments: list[Segment], reward: float) -> Trajectory:
    return Trajectory(uid, 0, 1, "train", prompt, segments, reward=reward, data_source="d")


def policy(*ids: int) -> Segment:
    return Segment(SegmentKind.POLICY, ids, tuple(-float(i) for i in ids), ((0, len(ids)),))


def seen(*ids: int) -> Segment:
    return Segment(SegmentKind.OBSERVATION, ids)


def test_layout_masks_and_score_position() -> None:
    """The pad id 0 also occurs as a sampled token: masks must not come from ids."""
    rows = [
        trajectory("a", (7, 8), [policy(1, PAD), seen(5, 5), policy(2), seen(6)], 0.5),
        trajectory("b", (9,), [policy(3)], 1.0),
    ]
    batch = to_data_proto(rows, PAD, temperature=1.0)
    assert batch.batch["prompts"].tolist() == [[7, 8], [PAD, 9]]
    assert batch.batch["responses"].tolist() == [[1, PAD, 5, 5, 2, 6], [3, PAD, PAD, PAD, PAD, PAD]]
    assert batch.batch["attention_mask"].tolist() == [[1] * 8, [0, 1, 1, 0, 0, 0, 0, 0]]
    assert batch.batch["position_ids"].tolist()[0] == list(range(8))
    assert batch.batch["position_ids"].tolist()[1][:3] == [0, 0, 1]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]]
    assert batch.batch["rollout_log_probs"].tolist()[0] == [-1.0, 0.0, 0.0, 0.0, -2.0, 0.0]
    assert batch.non_tensor_batch["uid"].tolist() == ["a", "b"]


def test_score_stands_on_the_last_policy_token_even_when_an_observation_ends_the_row() -> None:
    batch = to_data_proto([trajectory("a", (7,), [policy(1, 2), seen(5, 5)], 0.5)], PAD, temperature=1.0)
    assert batch.batch["token_level_scores"].tolist() == [[0.0, 0.5, 0.0, 0.0]]


def test_dealing_by_length_balances_consecutive_chunks_and_keeps_every_row() -> None:
    lengths = [4, 41, 8, 8, 23, 10, 32, 6, 19]
    dealt = deal_by_length(lengths, 2)
    assert sorted(dealt) == list(range(9))
    assert [sum(lengths[row] for row in chunk) for chunk in (dealt[:5], dealt[5:])] == [80, 71]
    assert deal_by_length(lengths, 1) == [1, 6, 4, 8, 5, 2, 3, 7, 0]
