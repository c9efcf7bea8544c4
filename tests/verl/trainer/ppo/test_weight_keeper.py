"""Which weights a run leaves behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import ray

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import TrainerConfig
from verl.trainer.ppo.weight_keeper import WeightKeeper


class SavingWorker(Worker):
    """Writes a file that tells how often it has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.saved = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str, stop_strings: Sequence[str]) -> None:
        self.saved += 1
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(f"{self.saved} {' '.join(stop_strings)}")


@pytest.fixture
def group(ray_session: None) -> Iterator[RayWorkerGroup]:
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    made = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(SavingWorker)))
    yield made
    made.shutdown()


def kept(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.glob("*"))}


def test_best_weights_are_those_of_the_highest_validation(group: RayWorkerGroup, tmp_path: Path) -> None:
    keeper = WeightKeeper(TrainerConfig(save_last=False), group, tmp_path, ("</s>",))
    keeper.after_validation(0, 0.5)
    assert (keeper.best_step, kept(tmp_path)) == (0, {})  # the policy before training is not written again
    for step, score in ((4, 0.4), (8, 0.7), (12, 0.7), (16, float("nan"))):
        keeper.after_validation(step, score)
    assert (keeper.best_step, keeper.best_score, kept(tmp_path)) == (8, 0.7, {"best": "1 </s>"})


def test_last_weights_are_written_at_the_end_and_every_save_freq(group: RayWorkerGroup, tmp_path: Path) -> None:
    keeper = WeightKeeper(TrainerConfig(total_training_steps=5, save_freq=2), group, tmp_path, ())
    seen = []
    for step in range(1, 6):
        keeper.after_step(step)
        seen.append(kept(tmp_path).get("last"))
    assert seen == [None, "1 ", "1 ", "2 ", "3 "]
    keeper.after_failure(5)
    assert kept(tmp_path) == {"last": "3 "}  # they are on disk already


def test_failed_run_keeps_what_it_learned(group: RayWorkerGroup, tmp_path: Path) -> None:
    keeper = WeightKeeper(TrainerConfig(total_training_steps=5), group, tmp_path, ())
    keeper.after_failure(0)
    assert kept(tmp_path) == {}  # nothing was learned
    keeper.after_failure(3)
    assert kept(tmp_path) == {"last": "1 "}


def test_nothing_is_written_where_nothing_is_asked_for(group: RayWorkerGroup, tmp_path: Path) -> None:
    keeper = WeightKeeper(TrainerConfig(total_training_steps=1, save_last=False, save_best=False), group, tmp_path, ())
    keeper.after_validation(1, 1.0)
    keeper.after_step(1)
    keeper.after_failure(1)
    assert kept(tmp_path) == {}


def test_dead_worker_is_said_and_hides_no_other_error(
    group: RayWorkerGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = WeightKeeper(TrainerConfig(total_training_steps=5), group, tmp_path, ())
    for worker in group.workers:
        ray.kill(worker)
    keeper.after_failure(2)
    assert "the weights after step 2 could not be written: ActorDiedError" in capsys.readouterr().out
