"""What a trainer is put together from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.agent_loop.base import AgentLoop
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.run_dir import RunDirectory
from verl.trainer.timing import PhaseTimer
from verl.trainer.watchdog import Watchdog
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tracking import Tracking


@dataclass(frozen=True)
class TrainerParts:
    """``main_ppo`` builds it; ``runner`` is the driver's one event loop."""

    config: PPOTrainerConfig
    environment: AgentLoop[Any]
    tokenizer: PreTrainedTokenizerBase
    train_set: RLHFDataset
    val_set: RLHFDataset | None
    actor_group: RayWorkerGroup
    rollout_group: RayWorkerGroup
    runner: asyncio.Runner
    run: RunDirectory
    tracking: Tracking
    timer: PhaseTimer
    watchdog: Watchdog
