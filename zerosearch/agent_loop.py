"""The search environment: a policy that thinks, searches and answers, with a simulated or a real search engine.

ZeroSearch (arXiv 2505.04588).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, ClassVar

from verl.agent_loop.alarm_rule import AlarmRule
from verl.agent_loop.base import (
    TRAIN,
    AgentLoop,
    AgentLoopContext,
    RewardFn,
    RewardInput,
    RolloutTask,
    RunPlan,
    Validation,
)
from verl.agent_loop.pauses import telling_pauses
from verl.agent_loop.trajectory import SegmentKind, Trajectory
from verl.utils.paths import resolve_path
from verl.workers.rollout.engine import RolloutEngine
from zerosearch import engines, report
from zerosearch.actions import STOP_STRINGS
from zerosearch.alarms import search_rules
from zerosearch.config import SearchConfig
from zerosearch.curriculum import noise_probability
from zerosearch.metrics import search_metrics
from zerosearch.probe import probe_pairs, query_sensitivity
from zerosearch.prompts import check_plain_encoding, load_prompt_template, load_simulation_template
from zerosearch.records import Episode
from zerosearch.reward import SearchReward, golden_answers, question_of, score_answer
from zerosearch.search.backend import SearchBackend
from zerosearch.search.engine import EngineBackend
from zerosearch.search.simulation import SimulationBackend
from zerosearch.simulation.client import ChatClient, ChatSampling, ClientSettings
from zerosearch.simulation.pool import ServerPool, parse_addresses
from zerosearch.turns import TurnRules, Turns


class SearchAgentLoop(AgentLoop[SearchConfig]):
    """Runs trajectories of at most ``max_turns`` searches under the noise curriculum.

    Training on a simulation LLM draws noise with the probability of the task's step; validation runs
    at noise 0, where the curriculum ends above 0 at its end, and on ``search_engine`` where
    validations were asked for in between. Training on a real engine knows no noise, and validation
    uses that engine first. A mode of a real engine has its name.
    """

    Config: ClassVar[type] = SearchConfig

    def __init__(self, config: SearchConfig, context: AgentLoopContext) -> None:
        """Raises ValueError for a tokenizer or limits that cannot hold an observation."""
        super().__init__(config, context)
        check_plain_encoding(context.tokenizer)
        self._rules = TurnRules.make(
            context.tokenizer,
            context.limits,
            max_turns=config.max_turns,
            topk=config.topk,
            think=config.think,
            corrective_message=config.corrective_message,
        )
        self._engines: dict[str, EngineBackend] = {}

    @cached_property
    def backend(self) -> SimulationBackend:
        """The simulation LLM: made at its first use, when ``services`` has settled the address. Raises ValueError
        for a wrong address or template."""
        config = self.config
        settings = ClientSettings(
            model=config.simulation_llm,
            api_key=config.api_key,
            request_timeout=config.request_timeout,
            deadline=config.deadline,
            max_concurrency=config.max_concurrency,
        )
        client = ChatClient(ServerPool(parse_addresses(config.ip), config.outage_deadline), settings)
        template = load_simulation_template(config.prompt_template or config.search_mode)
        sampling = ChatSampling(config.temperature, config.top_p, config.max_tokens)
        return SimulationBackend(config.search_mode, client, template, sampling, config.draw)

    def backend_of(self, mode: str) -> SearchBackend:
        """What answers the searches of a mode. Raises ValueError for a wrong address or template."""
        name = self.config.search_mode if mode == TRAIN else mode
        if name not in engines.IN_WORDS:
            return self.backend
        if name not in self._engines:
            self._engines[name] = engines.make_backend(name, self.config)
        return self._engines[name]

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return STOP_STRINGS

    @property
    def validation_modes(self) -> tuple[str, ...]:
        real = engines.validation_engines(self.config, self.context.test_freq)
        if not engines.is_simulated(self.config):
            return real
        noise = (report.NOISE_FREE, report.END_NOISE) if self.config.end_threshold > 0 else (report.NOISE_FREE,)
        return (*noise, *real)

    @classmethod
    def check(cls, config: SearchConfig, plan: RunPlan) -> list[str]:
        """A key, address or simulation server that this run needs and does not have."""
        return engines.problems(config, plan)

    @classmethod
    def announce(cls, config: SearchConfig, plan: RunPlan) -> list[str]:
        return engines.announcements(config, plan)

    @property
    def starts_services(self) -> bool:
        config = self.config
        return bool(config.embedded_model and not config.ip and engines.is_simulated(config))

    @contextmanager
    def services(self) -> Iterator[SearchConfig]:
        """Serves ``embedded_model`` where no address is given, and takes the keys that are needed from the
        environment."""
        config = engines.with_keys(self.config, self.context.test_freq)
        if not self.starts_services:
            yield config
            return
        from zerosearch.simulation.embedded import EmbeddedServer  # the server's dependencies only where one starts

        log_file = self.context.run_dir / "logs" / "simulation_server.log"
        with EmbeddedServer(
            resolve_path(config.embedded_model), log_file, options=config.embedded.server_options()
        ) as server:
            yield replace(config, ip=server.url, simulation_llm=server.model)

    async def preflight(self) -> list[str]:
        """Of everything that this run will search: template, address, a simulation server's model list, and one
        real search."""
        names = dict.fromkeys(TRAIN if m in (report.NOISE_FREE, report.END_NOISE) else m for m in self.validation_modes)
        return [problem for name in names for problem in await self._preflight_of(name)]

    async def _preflight_of(self, mode: str) -> list[str]:
        if mode == TRAIN and not self.config.ip:
            return ["no simulation server: give IP (retriever.ip), or a checkpoint to serve (retriever.embedded_model)"]
        try:
            backend = self.backend_of(mode)
        except ValueError as error:
            return [str(error)]
        return await backend.preflight()

    async def run(self, task: RolloutTask, engine: RolloutEngine, reward: RewardFn) -> Trajectory:
        row = task.prompt.row
        episode = Episode(
            question=question_of(row),
            golden_answers=golden_answers(row),
            hops=(row.get("extra_info") or {}).get("hops"),
            noise_probability=self._noise_probability(task),
        )
        turns = Turns(self._rules, task, engine, self.backend_of(task.mode), episode)
        await turns.run()
        return await self._rewarded(turns, reward)

    def _noise_probability(self, task: RolloutTask) -> float:
        config = self.config
        if not engines.is_simulated(config) or task.mode in engines.IN_WORDS:
            return 0.0
        if task.mode == TRAIN:
            total = self.context.total_steps
            return noise_probability(
                task.key.step, total, config.start_threshold, config.end_threshold, config.exp_base
            )
        assert task.mode in self.validation_modes, task.mode
        return config.end_threshold if task.mode == report.END_NOISE else 0.0

    async def _rewarded(self, turns: Turns, reward: RewardFn) -> Trajectory:
        task, answer = turns.task, turns.episode.answer
        scores = score_answer(answer, turns.episode.golden_answers)
        policy = (segment for segment in turns.segments if segment.kind is SegmentKind.POLICY)
        text = "".join(self.policy_text(segment.token_ids) for segment in policy)
        given = RewardInput(task.prompt.data_source, text, answer, task.prompt.row)
        returned = await reward(given)
        return task.trajectory(
            segments=turns.segments,
            status=turns.status,
            reward=returned["score"],
            reward_extra={name: value for name, value in returned.items() if name != "score"} | asdict(scores),
            environment=replace(turns.episode, scores=scores),
            timings={"generate": turns.generate_seconds, "search": turns.search_seconds},
        )

    @property
    def pause(self) -> str | None:
        return self.backend.pause if "backend" in self.__dict__ else None

    def paused_seconds(self, since: float) -> float:
        return self.backend.paused_seconds(since) if "backend" in self.__dict__ else 0.0

    def default_reward(self) -> RewardFn:
        return SearchReward(self.config.reward_metric)

    @classmethod
    def prompt_template(cls, name: str) -> str:
        return load_prompt_template(name).text

    @classmethod
    def check_row(cls, row: Mapping[str, Any]) -> None:
        question_of(row)
        golden_answers(row)

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        return search_metrics(trajectories)

    def alarm_rules(self) -> Sequence[AlarmRule]:
        return search_rules(self.config.alarms)

    def headline(self, metrics: Mapping[str, float]) -> str:
        return report.headline(metrics)

    @property
    def reported_scores(self) -> tuple[str, ...]:
        return ("f1", "em")

    def describe_mode(self, mode: str) -> str:
        if mode in engines.IN_WORDS:
            return engines.IN_WORDS[mode]
        return f"noise {self.config.end_threshold:g}" if mode == report.END_NOISE else "noise 0"

    def figures(self, validation: Mapping[str, float]) -> dict[str, str]:
        return report.figures(validation, self.validation_modes[0])

    def summary(self, before: Validation, after: Validation) -> dict[str, float]:
        return report.summary(before, after)

    async def probe(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Query sensitivity of the simulation LLM on the last searches of up to ``probe_samples`` rows; real
        engines are not probed."""
        if not engines.is_simulated(self.config):
            return {}
        pairs = probe_pairs(trajectories, self.config.probe_samples, self.context.seed, self.config.topk)
        return await telling_pauses(self, query_sensitivity(self.backend, pairs)) if pairs else {}

    def state_dict(self) -> dict[str, Any]:
        """What fixes the curriculum and the draws."""
        return {
            "total_steps": self.context.total_steps,
            "start_threshold": self.config.start_threshold,
            "end_threshold": self.config.end_threshold,
            "exp_base": self.config.exp_base,
            "seed": self.context.seed,
        }

    async def close(self) -> None:
        if "backend" in self.__dict__:
            await self.backend.close()
        for engine in self._engines.values():
            await engine.close()
