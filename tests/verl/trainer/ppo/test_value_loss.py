from __future__ import annotations

import pytest
import torch

from tests.verl.trainer.ppo.batches import dense_batch
from verl.trainer.ppo.value_loss import compute_value_loss

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
CLIP = 0.5


def plain_loss(
    vpreds: torch.Tensor, returns: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, mode: str
) -> torch.Tensor:
    tokens, rows = int(mask.sum()), int(mask.any(1).sum())
    loss = torch.zeros(())
    for i in range(len(mask)):
        for j in mask[i].nonzero()[:, 0].tolist():
            cut = vpreds[i, j].clamp(values[i, j].item() - CLIP, values[i, j].item() + CLIP)
            error = max((vpreds[i, j] - returns[i, j]) ** 2, (cut - returns[i, j]) ** 2) / 2
            share = {"token-mean": tokens, "seq-mean-token-sum": rows, "seq-mean-token-mean": rows * int(mask[i].sum())}
            loss = loss + error / share[mode]
    return loss


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_equal_a_plain_loop_over_the_policy_tokens(mode: str) -> None:
    batch = dense_batch(3)
    mask = batch.mask.bool()
    vpreds = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss, _ = compute_value_loss(vpreds, batch.rewards, batch.values, batch.mask, CLIP, mode)
    expected = plain_loss(vpreds, batch.rewards, batch.values, mask, mode)
    torch.testing.assert_close(loss, expected)
    (ours,), (plain,) = torch.autograd.grad(loss, vpreds), torch.autograd.grad(expected, vpreds)
    torch.testing.assert_close(ours, plain)
    assert not ours[~mask].any()


@pytest.mark.parametrize("mode", MODES)
def test_ragged_parts_add_up_to_the_whole_with_global_counts(mode: str) -> None:
    batch = dense_batch(6)
    vpreds = batch.values + 0.3
    whole, _ = compute_value_loss(vpreds, batch.rewards, batch.values, batch.mask, CLIP, mode)
    parts = [
        compute_value_loss(
            vpreds[rows],
            batch.rewards[rows],
            batch.values[rows],
            batch.mask[rows],
            CLIP,
            mode,
            batch_num_tokens=int(batch.mask.sum()),
            global_batch_size=len(batch.mask),
        )[0]
        for rows in (slice(0, 2), slice(2, 9))
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize(
    ("vpred", "target", "loss", "slope", "clipped"),
    [
        (0.2, 1.0, 0.32, -0.8, 0),  # inside the range
        (0.9, 2.0, (2 - 0.5) ** 2 / 2, 0.0, 1),  # moved too far towards the target: no further
        (-0.9, 2.0, 2.9**2 / 2, -2.9, 0),  # moved away: pulled back in full
    ],
)
def test_clipping_by_value(vpred: float, target: float, loss: float, slope: float, clipped: float) -> None:
    prediction = torch.tensor([[vpred]], requires_grad=True)
    value, share = compute_value_loss(
        prediction, torch.tensor([[target]]), torch.zeros(1, 1), torch.ones(1, 1), cliprange_value=0.5
    )
    value.backward()
    assert prediction.grad is not None
    assert value.item() == pytest.approx(loss)
    assert prediction.grad.item() == pytest.approx(slope)
    assert share.item() == clipped


def test_an_empty_mask_gives_zero() -> None:
    loss, share = compute_value_loss(torch.ones(2, 2), torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2), 0.5)
    assert loss.item() == share.item() == 0
