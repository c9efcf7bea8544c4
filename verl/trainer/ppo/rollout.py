"""One rollout, for training and validation alike: tasks out, their trajectories back in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tqdm import tqdm

from verl.agent_loop.base import RolloutTask
from verl.agent_loop.stream import TrajectoryStream
from verl.agent_loop.trajectory import Prompt, Trajectory
from verl.workers.rollout.engine import InfrastructureError, SampleKey, SamplingParams


def make_tasks(
    prompts: Iterable[Prompt], samples: int, seed: int, step: int, mode: str, sampling: SamplingParams
) -> list[RolloutTask]:
    """``samples`` tasks for each prompt, keyed by (seed, step, uid, sample)."""
    return [
        RolloutTask(prompt, SampleKey(seed, step, prompt.uid, sample), mode, sampling)
        for prompt in prompts
        for sample in range(samples)
    ]


def run_tasks(stream: TrajectoryStream, tasks: Sequence[RolloutTask], title: str) -> list[Trajectory]:
    """The trajectories of all tasks in the order of the tasks, whatever finished first; shows a progress bar."""
    stream.submit(tasks)
    progress = tqdm(stream.take(), total=len(tasks), desc=title, leave=False, disable=None)
    done = {(t.uid, t.sample): t for t in progress}
    assert len(done) == len(tasks), "a group has a wrong number of trajectories"
    return [done[task.prompt.uid, task.key.sample] for task in tasks]


def without_lost(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [t for t in trajectories if not t.lost]


def failures_by_type(trajectories: Sequence[Trajectory]) -> Counter[str]:
    """How many were lost to the infrastructure, by the type of error."""
    return Counter((t.failure or "unknown").partition(":")[0] for t in trajectories if t.lost)


def check_failed_share(trajectories: Sequence[Trajectory], limit: float) -> None:
    """Raises InfrastructureError when more than the share ``limit`` was lost to the infrastructure, or all were."""
    failed = [t for t in trajectories if t.lost]
    if len(failed) > limit * len(trajectories) or len(failed) == len(trajectories):
        raise InfrastructureError(
            f"{len(failed)} of {len(trajectories)} trajectories were lost to the infrastructure "
            f"(rollout.max_failed_share is {limit}); the last: {failed[-1].failure}"
        )
