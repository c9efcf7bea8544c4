"""Signs of collapse in words: rules over a step's metrics, with hysteresis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from verl.agent_loop.alarm_rule import AlarmRule
from verl.trainer.config import AlarmConfig


@dataclass
class RuleState:
    """What a rule remembers. ``streak`` counts the latest steps in a row that speak for a change of
    ``active`` (or, before it is ``armed``, for arming); ``first`` is the first positive value,
    ``previous`` the latest."""

    armed: bool
    active: bool = False
    streak: int = 0
    first: float | None = None
    previous: float | None = None


@dataclass
class AlarmRecord:
    """One alarm from the first to the last step for which ``alarm/{name}`` is 1."""

    name: str
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class AlarmReport:
    """Of one step: ``alarm/{name}`` 0 or 1 for every rule whose metric has been seen, and the sentences of
    the alarms that began or ended."""

    metrics: dict[str, float]
    lines: list[str]


@dataclass
class Alarms:
    """One engine for the trainer's rules and the environment's.

    An alarm begins after ``steps`` steps in a row beyond the bound and ends after as many within it. A
    step in which a rule's metric is missing, as the actor's are while only the critic is trained,
    changes nothing for that rule. Raises ValueError for two rules of one name.
    """

    rules: Sequence[AlarmRule]
    steps: int
    records: list[AlarmRecord] = field(default_factory=list)
    """In the order in which they began."""

    def __post_init__(self) -> None:
        self.rules = [rule for rule in self.rules if rule.bound is not None]
        names = [rule.name for rule in self.rules]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"two alarms have one name: {', '.join(repeated)}")
        self._states = {rule.name: RuleState(armed=not rule.armed_first) for rule in self.rules}

    def observe(self, step: int, metrics: Mapping[str, float]) -> AlarmReport:
        """Takes in one step's metrics. Called once per training step, in order."""
        lines = [line for rule in self.rules if (line := self._observe(rule, step, metrics))]
        seen = {name: state for name, state in self._states.items() if state.previous is not None}
        return AlarmReport({f"alarm/{name}": float(state.active) for name, state in seen.items()}, lines)

    def _observe(self, rule: AlarmRule, step: int, metrics: Mapping[str, float]) -> str | None:
        """The sentence of an alarm that begins or ends at this step."""
        state = self._states[rule.name]
        value = _value(rule, metrics)
        began = ended = False
        if value is not None:
            beyond = _beyond(rule, state, value)
            began, ended = self._advance(rule, state, beyond)
            if state.first is None and math.isfinite(value) and value > 0:
                state.first = value
            state.previous = value
        if began:
            self.records.append(AlarmRecord(rule.name, step, step))
        elif state.active:
            self._latest(rule.name).last_step = step
        if value is None or not (began or ended):
            return None
        return _begin_sentence(rule, state, value) if began else _end_sentence(rule, value)

    def _advance(self, rule: AlarmRule, state: RuleState, beyond: bool) -> tuple[bool, bool]:
        """Whether the alarm begins, whether it ends."""
        towards_change = beyond != state.active if state.armed else not beyond
        state.streak = state.streak + 1 if towards_change else 0
        begins = state.armed and not state.active
        if state.streak < (1 if begins and rule.at_once else self.steps):
            return False, False
        state.streak = 0
        if not state.armed:
            state.armed = True
            return False, False
        state.active = not state.active
        return state.active, not state.active

    def _latest(self, name: str) -> AlarmRecord:
        return next(record for record in reversed(self.records) if record.name == name)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: what each rule remembers, by name, and the records."""
        states = {name: asdict(state) for name, state in self._states.items()}
        return {"rules": states, "records": [asdict(record) for record in self.records]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A rule that the state does not know starts anew; what the state knows of rules that are switched off
        now is forgotten, their records apart."""
        for name in self._states.keys() & state["rules"].keys():
            self._states[name] = RuleState(**state["rules"][name])
        self.records = [AlarmRecord(**record) for record in state["records"]]


def _value(rule: AlarmRule, metrics: Mapping[str, float]) -> float | None:
    if rule.metric not in metrics:
        return None
    if rule.per is None:
        return metrics[rule.metric]
    return metrics[rule.metric] / metrics[rule.per] if metrics.get(rule.per) else None


def _beyond(rule: AlarmRule, state: RuleState, value: float) -> bool:
    assert rule.bound is not None
    if not math.isfinite(value):
        return True
    measured = value
    if rule.measure == "times_first":
        if state.first is None:
            return False
        measured = value / state.first
    elif rule.measure == "increase":
        measured = value - (state.previous or 0.0)
    return measured > rule.bound if rule.side == "above" else measured < rule.bound


def _begin_sentence(rule: AlarmRule, state: RuleState, value: float) -> str:
    first = f" ({state.first:.4g})" if rule.measure == "times_first" and state.first is not None else ""
    return f"alarm: {rule.subject} is {value:.4g}, {rule.limit}{first}: {rule.meaning}; {rule.remedy}."


def _end_sentence(rule: AlarmRule, value: float) -> str:
    return f"alarm ended: {rule.subject} is {value:.4g}, no longer {rule.limit}."


def trainer_rules(config: AlarmConfig) -> list[AlarmRule]:
    """The rules that hold for every environment, over the trainer's own metrics."""
    return [*_entropy_rules(config), *_kl_rules(config), *_rollout_rules(config), *_numeric_rules(config)]


def _entropy_rules(config: AlarmConfig) -> list[AlarmRule]:
    return [
        AlarmRule(
            name="entropy_low",
            metric="actor/entropy",
            side="below",
            bound=config.entropy_low,
            measure="times_first",
            meaning="the policy has become almost deterministic and explores no more",
            remedy="try a lower actor.optim.lr, a larger rollout.n or actor.entropy_coeff above 0",
        ),
        AlarmRule(
            name="entropy_high",
            metric="actor/entropy",
            side="above",
            bound=config.entropy_high,
            measure="times_first",
            meaning="the policy drifts towards random tokens",
            remedy="try a lower actor.optim.lr, a lower actor.entropy_coeff or a larger actor.kl_loss_coef",
        ),
    ]


def _kl_rules(config: AlarmConfig) -> list[AlarmRule]:
    meaning = "the policy is far from the model it started from, as when training has broken its language"
    return [
        AlarmRule(
            name="kl_loss",
            metric="actor/kl_loss",
            side="above",
            bound=config.kl,
            meaning=meaning,
            remedy="try a lower actor.optim.lr or a larger actor.kl_loss_coef",
        ),
        AlarmRule(
            name="reward_kl",
            metric="actor/reward_kl_penalty",
            per="response_length/policy/mean",
            side="above",
            bound=config.kl,
            meaning=meaning,
            remedy="try a lower actor.optim.lr or a larger algorithm.kl_ctrl.kl_coef",
        ),
    ]


def _rollout_rules(config: AlarmConfig) -> list[AlarmRule]:
    return [
        AlarmRule(
            name="response_short",
            metric="response_length/policy/mean",
            side="below",
            bound=config.response_short,
            measure="times_first",
            meaning="the policy has stopped thinking and acting before it answers",
            remedy="read trajectories/: a reward that a bare guess collects, or an actor.optim.lr too high",
        ),
        AlarmRule(
            name="response_long",
            metric="response_length/policy/mean",
            side="above",
            bound=config.response_long,
            measure="times_first",
            meaning="the policy rambles or repeats itself",
            remedy="read trajectories/; try a lower actor.optim.lr or a smaller data.max_response_length",
        ),
        AlarmRule(
            name="truncated",
            metric="status/truncated",
            side="above",
            bound=config.truncated,
            meaning="trajectories reach their budget before they end, so most rewards judge the cut",
            remedy="try a larger data.max_response_length; where lengths grew, read trajectories/ for repetition",
        ),
        AlarmRule(
            name="zero_variance",
            metric="group/zero_variance",
            side="above",
            bound=config.zero_variance,
            meaning="nearly all groups have equal rewards and teach nothing",
            remedy="try a larger rollout.n, easier or harder data, or a finer reward",
        ),
    ]


def _numeric_rules(config: AlarmConfig) -> list[AlarmRule]:
    mismatch = AlarmRule(
        name="sampler_mismatch",
        metric="training/rollout_log_prob_diff_mean",
        side="above",
        bound=config.sampler_mismatch,
        meaning="sampler and trainer disagree about the same tokens, so updates follow another policy's samples",
        remedy="compare precision and sampling settings of rollout and actor, or set actor.rollout_is_threshold",
    )
    return [mismatch, *(_skipped_updates(model, config) for model in ("actor", "critic"))]


def _skipped_updates(model: str, config: AlarmConfig) -> AlarmRule:
    return AlarmRule(
        name=f"{model}_nonfinite_updates",
        metric=f"{model}/nonfinite_updates",
        side="above",
        bound=config.nonfinite_updates,
        measure="increase",
        at_once=True,
        meaning="an update was skipped because its loss or gradient was not finite",
        remedy=f"see nonfinite/ in the run directory; try a lower {model}.optim.lr or float32",
    )
