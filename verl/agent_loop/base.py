"""The contract between the trainer and an environment.

verl knows an environment by import path alone. It validates its ``Config``, starts its services,
probes them, runs its trajectories, logs its metrics and checkpoints its state without knowing
what the environment does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from verl.agent_loop.alarm_rule import AlarmRule
from verl.agent_loop.trajectory import Prompt, TokenIds, Trajectory
from verl.utils.paths import resolve_path
from verl.workers.rollout.engine import InfrastructureError, RolloutEngine, SampleKey, SamplingParams

ConfigT = TypeVar("ConfigT")


class RunEndingError(InfrastructureError):
    """A service that a run cannot do without is given up: nothing is generated anew, the run ends."""


TRAIN = "train"
"""The mode of training rollouts; every other mode is one an environment lists for validation."""


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Token budgets: of the whole trajectory after the prompt, of one generation, of one observation."""

    max_response_length: int
    max_turn_length: int
    max_observation_length: int


@dataclass(frozen=True)
class RewardInput:
    """What a reward function sees. ``solution_str`` is the text of the policy tokens only;
    ``answer`` what the environment's parser took for the answer, None where there is none."""

    data_source: str
    solution_str: str
    answer: str | None
    row: Mapping[str, Any]


RewardFn = Callable[[RewardInput], Awaitable[dict[str, float]]]
"""Returns scores by name; ``score`` is the reward."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How much a run will ask of its environment.

    ``validations`` counts all of them, of which ``full_validations`` run every validation mode and the
    others the first one alone; ``test_freq`` 0 means that none was asked for between the first and the
    last.
    """

    total_steps: int
    trajectories_per_step: int
    validation_rows: int
    validation_samples: int
    validations: int
    full_validations: int
    test_freq: int


@dataclass(frozen=True)
class AgentLoopContext:
    """What the trainer gives every environment. ``total_steps`` counts updates; ``test_freq`` is the
    number of steps between validations, 0 where none was asked for in between."""

    tokenizer: PreTrainedTokenizerBase
    limits: RolloutLimits
    eos_token_ids: frozenset[int]
    seed: int
    total_steps: int
    run_dir: Path
    test_freq: int = 0


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """One trajectory to run: ``key`` names it (seed, step, uid, sample); ``mode`` is TRAIN or one of
    the environment's ``validation_modes``."""

    prompt: Prompt
    key: SampleKey
    mode: str
    sampling: SamplingParams

    @property
    def session(self) -> str:
        """Under which an engine keeps the key/value cache of this trajectory."""
        return f"{self.mode}/{self.key.step}/{self.key.uid}/{self.key.sample}"

    def trajectory(self, **outcome: Any) -> Trajectory:
        """The record of this task; ``outcome`` holds the fields of Trajectory that the run of it decided."""
        return Trajectory(
            uid=self.prompt.uid,
            sample=self.key.sample,
            step=self.key.step,
            mode=self.mode,
            prompt_ids=self.prompt.prompt_ids,
            data_source=self.prompt.data_source,
            **outcome,
        )


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """What is kept of a validation trajectory: its data row (file and index), sample number and scores by name."""

    row_id: str
    sample: int
    data_source: str
    scores: Mapping[str, float]


Validation = Mapping[str, Sequence[ScoredRow]]
"""One validation: scored rows by mode."""


def scores_by_row(rows: Sequence[ScoredRow], score: str) -> dict[str, float]:
    """The mean of each data row's samples: the unit over which intervals are taken."""
    grouped: dict[str, list[float]] = {}
    for row in rows:
        grouped.setdefault(row.row_id, []).append(row.scores[score])
    return {row_id: sum(values) / len(values) for row_id, values in grouped.items()}


class AgentLoop(ABC, Generic[ConfigT]):
    """One environment.

    The driver holds one instance (services, preflight, metrics, state), each rollout worker
    another (``run``). ``Config`` is a frozen dataclass; its section of the configuration is
    validated against it.
    """

    Config: ClassVar[type]

    def __init__(self, config: ConfigT, context: AgentLoopContext) -> None:
        self.config = config
        self.context = context

    @property
    def validation_modes(self) -> tuple[str, ...]:
        """Settings under which to validate; the first is the one by which the best weights are chosen."""
        return ("validation",)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Where generations end; an exported policy's generation configuration carries them."""
        return ()

    @classmethod
    def check(cls, config: ConfigT, plan: RunPlan) -> list[str]:
        """Problems that can be seen without starting anything, each with its fix; empty when all is well."""
        return []

    @classmethod
    def announce(cls, config: ConfigT, plan: RunPlan) -> list[str]:
        """What a person should read before the run starts, such as what it will cost."""
        return []

    @contextmanager
    def services(self) -> Iterator[ConfigT]:
        """Starts what the environment needs beside the trainer; yields the configuration for the workers."""
        yield self.config

    @property
    def starts_services(self) -> bool:
        """Whether ``services`` starts anything. Where not, ``preflight`` is called with the other checks, before
        anything of the run starts; otherwise as soon as the services are up."""
        return False

    async def preflight(self) -> list[str]:
        """Problems that would stop a run, each with its fix; empty when all is well. Called inside ``services``."""
        return []

    @abstractmethod
    async def run(self, task: RolloutTask, engine: RolloutEngine, reward: RewardFn) -> Trajectory:
        """Runs one trajectory to its end, reward included.

        Raises InfrastructureError when something other than the policy failed; the caller then
        regenerates the sample once and otherwise records INFRASTRUCTURE_FAILED.
        """

    @property
    def pause(self) -> str | None:
        """While no service answers and trajectories wait for one: which, since when and why, in a sentence that
        stays the same. An environment that pauses must end the pause itself, by going on or by RunEndingError."""
        return None

    def paused_seconds(self, since: float) -> float:
        """How much of the time from ``since`` (``time.monotonic``) to now was paused: no deadline counts it."""
        return 0.0

    def default_reward(self) -> RewardFn:
        """The environment's own reward. Raises ValueError where it has none and a user must supply one."""
        raise ValueError(f"{type(self).__name__} has no reward of its own: set custom_reward_function.path")

    @classmethod
    def prompt_template(cls, name: str) -> str:
        """The text in which ``{question}`` becomes the user message: a name the environment knows, or a file."""
        path = Path(resolve_path(name))
        if not path.is_file():
            raise ValueError(f"data.prompt_template: {name!r} is not a file")
        return path.read_text()

    @classmethod
    def check_row(cls, row: Mapping[str, Any]) -> None:
        """Raises ValueError saying what of a data row the environment cannot use; the caller adds file and row."""

    @classmethod
    def check_reward(cls, row: Mapping[str, Any]) -> None:
        """As `check_row`, for what the environment's own reward needs: not asked where the user supplies the reward."""

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """The environment's own metrics of a set of trajectories (one step's, or one validation mode's)."""
        return {}

    def alarm_rules(self) -> Sequence[AlarmRule]:
        """Signs of collapse in the environment's own metrics of a training step; the trainer watches them."""
        return ()

    def headline(self, metrics: Mapping[str, float]) -> str:
        """The environment's part of the one line a person reads per step."""
        return ""

    @property
    def reported_scores(self) -> tuple[str, ...]:
        """Names of the scores that the closing table shows; each stands in every trajectory's ``reward_extra``."""
        return ("reward",)

    def describe_mode(self, mode: str) -> str:
        """A validation mode in words."""
        return mode

    def figures(self, validation: Mapping[str, float]) -> dict[str, str]:
        """Further lines of the closing table from the last validation's metrics (``val/{mode}/…``)."""
        return {}

    def summary(self, before: Validation, after: Validation) -> dict[str, float]:
        """The environment's part of summary.json: its held-out scores before and after training."""
        return {}

    async def probe(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Measurements after a validation that need further calls to the environment's services."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must agree on, as plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError naming what differs from this run's configuration."""
        if state != self.state_dict():
            raise ValueError(f"the checkpoint's environment state {dict(state)} is not this run's {self.state_dict()}")

    def policy_text(self, ids: TokenIds) -> str:
        """What the policy wrote, without end-of-sequence and other special tokens."""
        decode = self.context.tokenizer.decode
        return str(decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    async def close(self) -> None:
        """Ends connections held by this instance."""
