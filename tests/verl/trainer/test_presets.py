from __future__ import annotations

import pytest

from verl.trainer.compose import compose_config
from verl.trainer.resources import Findings
from verl.trainer.setup import environment_config
from verl.trainer.sizes import check_batches, check_lengths


@pytest.mark.parametrize(("algorithm", "kl_in_reward"), [("grpo", False), ("ppo", True), ("reinforce", False)])
def test_the_originals_choices_compose_with_every_algorithm(algorithm: str, kl_in_reward: bool) -> None:
    config = compose_config([f"algorithm={algorithm}", "trainer.total_training_steps=203", "+preset=original"]).config
    actor = config.actor_rollout_ref.actor
    assert (config.algorithm.use_kl_in_reward, actor.use_kl_loss) == (kl_in_reward, not kl_in_reward)
    assert config.algorithm.baseline == "none"
    assert environment_config(config).draw == "call"
    assert (actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size) == (51, 51)
    assert (actor.optim.lr_warmup_steps, config.critic.optim.lr_warmup_steps) == (385, 6)
    assert (actor.entropy_coeff, actor.rollout_is_threshold) == (0.001, None)
    findings = Findings()
    check_lengths(config, 32768, findings)
    check_batches(config, findings)
    assert findings.problems == []


def test_what_the_original_shares_with_the_defaults_is_left_alone() -> None:
    original, default = (compose_config(overrides).plain for overrides in (["+preset=original"], []))
    assert original["data"] == default["data"]
    assert original["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-6
    assert original["algorithm"]["gamma"] == original["algorithm"]["lam"] == 1.0
    changed = {key for key, value in original["retriever"].items() if value != default["retriever"][key]}
    assert changed == {"draw"}


def test_overrides_win_over_a_preset() -> None:
    config = compose_config(["+preset=original", "retriever.draw=trajectory", "algorithm.baseline=batch"]).config
    assert (config.retriever["draw"], config.algorithm.baseline) == ("trajectory", "batch")


def test_a_preset_of_another_environment_is_refused_with_the_environment_that_is_asked() -> None:
    config = compose_config(["+preset=quickstart", "environment=single_turn"]).config
    with pytest.raises(ValueError, match="unknown key") as error:
        environment_config(config)
    message = str(error.value)
    assert "environment.path=verl.agent_loop.single_turn.SingleTurnLoop, which knows stop:" in message
    assert "leave out either the preset or environment=…" in message
