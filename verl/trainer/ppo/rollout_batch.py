"""The one place where trajectories become a DataProto."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from verl.agent_loop.trajectory import SegmentKind, Trajectory
from verl.protocol import DataProto


def to_data_proto(trajectories: Sequence[Trajectory], pad_token_id: int, temperature: float) -> DataProto:
    """Trajectories as one padded batch, in the order given.

    Prompts are padded on the left, responses on the right. With P and R the longest prompt and
    response: ``prompts`` (batch, P), ``responses`` (batch, R), ``input_ids``, ``attention_mask`` and
    ``position_ids`` (batch, P + R), all int64; ``response_mask`` (batch, R) int64, 1 on policy
    tokens; ``rollout_log_probs`` and ``token_level_scores`` (batch, R) float32. The score stands on
    the last policy token. Masks come from lengths, never from token ids.
    """
    prompts = [torch.tensor(t.prompt_ids, dtype=torch.int64) for t in trajectories]
    responses = [torch.tensor(t.response_ids, dtype=torch.int64) for t in trajectories]
    prompt_ids = _pad(prompts, pad_token_id, left=True)
    response_ids = _pad(responses, pad_token_id)
    attention = torch.cat([_pad([_ones(p) for p in prompts], 0, left=True), _pad([_ones(r) for r in responses], 0)], 1)
    masks = [torch.tensor(t.response_mask, dtype=torch.int64) for t in trajectories]
    log_probs = [torch.tensor(t.response_log_probs, dtype=torch.float32) for t in trajectories]
    tensors = {
        "prompts": prompt_ids,
        "responses": response_ids,
        "input_ids": torch.cat([prompt_ids, response_ids], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": _pad(masks, 0),
        "rollout_log_probs": _pad(log_probs, 0.0),
        "token_level_scores": _pad([_score_row(t) for t in trajectories], 0.0),
    }
    non_tensors = {
        "uid": np.array([t.uid for t in trajectories], dtype=object),
        "data_source": np.array([t.data_source for t in trajectories], dtype=object),
    }
    return DataProto.from_dict(tensors, non_tensors, meta_info={"temperature": temperature})


def deal_by_length(lengths: Sequence[int], ranks: int) -> list[int]:
    """An order of rows of these ``lengths`` in which ``ranks`` consecutive chunks, as dispatch cuts them, hold
    about equally many tokens.

    Longest first, dealt back and forth over the ranks; a function of order and lengths.
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    for number, row in enumerate(longest_first):
        lap, place = divmod(number, ranks)
        hands[place if lap % 2 == 0 else ranks - 1 - place].append(row)
    return [row for hand in sorted(hands, key=len, reverse=True) for row in hand]


def _score_row(trajectory: Trajectory) -> torch.Tensor:
    row = torch.zeros(len(trajectory.response_ids), dtype=torch.float32)
    row[last_policy_token(trajectory)] = trajectory.reward
    return row


def last_policy_token(trajectory: Trajectory) -> int:
    """Index in the response of the last token the policy sampled."""
    end = len(trajectory.response_ids)
    for segment in reversed(trajectory.segments):
        if segment.kind is SegmentKind.POLICY and segment.token_ids:
            return end - 1
        end -= len(segment.token_ids)
    raise AssertionError(f"trajectory {trajectory.uid}/{trajectory.sample} holds no policy token")


def _ones(row: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(row)


def _pad(rows: Sequence[torch.Tensor], value: float, left: bool = False) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_value=value, padding_side="left" if left else "right"
    )
