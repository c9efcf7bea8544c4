"""When the watchdog acts, and what it turns an interrupt into."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from tests.verl.trainer.ppo.test_regressions import trainer_on
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import PPOTrainerConfig, TrainerConfig
from verl.trainer.timing import PhaseTimer
from verl.trainer.watchdog import Watchdog, WatchdogError, watchdog_problems
from verl.utils.dataset.rl_dataset import Row
from verl.utils.stack_dump import DumpTarget, process_started, request_dump


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Interrupts:
    count = 0

    def __call__(self) -> None:
        self.count += 1


def made(directory: Path, timeout: float = 10) -> tuple[Watchdog, PhaseTimer, Clock, Interrupts]:
    timer, clock, interrupts = PhaseTimer(), Clock(), Interrupts()
    return Watchdog(timeout, timer, directory, clock, interrupts), timer, clock, interrupts


def test_phases_and_marks_are_progress_and_silence_is_not(tmp_path: Path) -> None:
    watchdog, timer, clock, _ = made(tmp_path)
    clock.now = 9.5
    assert not watchdog.look()
    with timer.phase("rollout"):
        clock.now = 11
        assert not watchdog.look()
        clock.now = 20
        timer.mark()
        assert not watchdog.look()
        clock.now = 29.5
        assert not watchdog.look()
        clock.now = 30
        assert watchdog.look()
    assert not watchdog.look()


def test_trajectories_that_arrive_are_progress_of_the_run(tmp_path: Path) -> None:
    trainer = trainer_on([Row("a.parquet", 0, (1,), {}, "a")], tmp_path)
    before = trainer._timer.progress
    trainer._stream._on_progress()
    assert trainer._timer.progress == before + 1


def test_the_error_names_phase_seconds_and_files_and_takes_the_interrupts_place(tmp_path: Path) -> None:
    watchdog, timer, clock, interrupts = made(tmp_path)

    def interrupted() -> None:
        with watchdog.guard(), timer.phase("validate"), timer.phase("update"):
            clock.now = 12
            watchdog.act()
            assert interrupts.count == 1
            raise KeyboardInterrupt

    with pytest.raises(WatchdogError) as raised:
        interrupted()
    file = tmp_path / "stacks-driver.txt"
    assert str(raised.value) == (f"no progress for 12 s in phase 'update' (trainer.watchdog_timeout); stacks: {file}")
    assert "test_the_error_names_phase" in file.read_text()


def test_ctrl_c_still_means_interrupted(tmp_path: Path) -> None:
    watchdog, *_ = made(tmp_path)
    with pytest.raises(KeyboardInterrupt), watchdog.guard():
        raise KeyboardInterrupt


def test_zero_starts_no_thread(tmp_path: Path) -> None:
    watchdog, *_, interrupts = made(tmp_path, timeout=0)
    with watchdog:
        assert watchdog._thread is None
    assert interrupts.count == 0


def test_a_run_that_has_ended_is_not_interrupted(tmp_path: Path) -> None:
    watchdog, *_, interrupts = made(tmp_path)
    with watchdog:
        pass
    watchdog.act()
    assert (interrupts.count, watchdog.error) == (0, None)


def test_the_timeout_must_exceed_the_silence_allowed_to_a_rollout() -> None:
    def problems(seconds: float) -> list[str]:
        return watchdog_problems(replace(PPOTrainerConfig(), trainer=TrainerConfig(watchdog_timeout=seconds)))

    assert problems(0) == problems(1500.5) == problems(TrainerConfig().watchdog_timeout) == []
    (problem,) = problems(1500)
    assert "trainer.watchdog_timeout is 1500 s" in problem


def test_a_process_of_the_same_number_is_not_signalled() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(child.pid)
    assert not request_dump(DumpTarget("node", child.pid, started - 1, ""))
    assert child.poll() is None
    child.communicate(b"\n")
    assert not request_dump(DumpTarget("node", child.pid, started, ""))


class StuckInC(Worker):
    def hold_the_lock(self, started: str) -> None:
        """Stuck in C code that never gives the interpreter's lock back."""
        import ctypes

        Path(started).touch()
        ctypes.PyDLL(None).sleep(3600)


def test_a_worker_stuck_in_c_code_dumps_all_its_threads(ray_session: None, tmp_path: Path) -> None:
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(StuckInC)))
    watchdog, *_ = made(tmp_path)
    watchdog.watch("StuckInC", group.execute_all_async("dump_stacks_on_signal", str(tmp_path)))
    ray.get(watchdog.targets)
    group.execute_all_async("hold_the_lock", str(tmp_path / "started"))
    while not (tmp_path / "started").exists():
        ray.wait(watchdog.targets, timeout=0.1)
    watchdog.act()
    group.shutdown()
    file = tmp_path / "stacks-StuckInC-0.txt"
    assert str(file) in str(watchdog.error)
    assert "none from" not in str(watchdog.error)
    assert "hold_the_lock" in file.read_text()


def test_a_worker_that_has_ended_is_named_as_one_without_stacks(ray_session: None, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    started = process_started(ended.pid)
    ended.wait()
    node = ray.get_runtime_context().get_node_id()
    watchdog, *_ = made(tmp_path)
    watchdog.watch("Actor", [ray.put(DumpTarget(node, ended.pid, started, str(tmp_path / "stacks-Actor-0.txt")))])
    watchdog.act()
    assert str(watchdog.error).endswith(f"stacks: {tmp_path / 'stacks-driver.txt'}; none from Actor-0")
