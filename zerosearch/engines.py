"""Which search engines a run uses, what is missing for them, and what they cost."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from verl.agent_loop.base import RunPlan
from zerosearch.config import SearchConfig
from zerosearch.prompts import load_simulation_template
from zerosearch.search.engine import EngineBackend
from zerosearch.search.google import GoogleSearch
from zerosearch.search.http import HttpSettings
from zerosearch.search.wiki import WikiRetriever
from zerosearch.simulation.pool import parse_addresses

GOOGLE, WIKI = "google", "wiki"
IN_WORDS = {GOOGLE: "Google search", WIKI: "wiki retriever"}
"""Real engines by the name of their validation mode."""

_ENVIRONMENT_VARIABLE = "env:"
_WIKI_PORT = 6002
_WIKI_PATH = "/retrieve"


def is_simulated(config: SearchConfig) -> bool:
    """Whether training searches a simulation LLM."""
    return config.search_mode not in IN_WORDS


def validation_engines(config: SearchConfig, test_freq: int) -> tuple[str, ...]:
    """The real engines that validation uses; the training's own comes first."""
    asked = (config.search_engine,) if test_freq > 0 else ()
    return tuple(dict.fromkeys(name for name in (config.search_mode, *asked) if name in IN_WORDS))


def _used_engines(config: SearchConfig, plan: RunPlan) -> tuple[str, ...]:
    """As `validation_engines`, of which only the training's own is used where nothing is validated."""
    return validation_engines(config, plan.test_freq if plan.validations > 0 else 0)


def make_backend(name: str, config: SearchConfig) -> EngineBackend:
    """A real engine, its key already settled (`with_keys`). Raises ValueError for a wrong address."""
    settings = HttpSettings(config.request_timeout, config.deadline, config.max_concurrency)
    if name == WIKI:
        urls = parse_addresses(config.wiki.address, _WIKI_PORT, _WIKI_PATH)
        return EngineBackend(name, WikiRetriever(urls, config.wiki.protocol, settings))
    assert name == GOOGLE, name
    google, key = config.google, config.google.api_key
    return EngineBackend(name, GoogleSearch(google.base_url, key, google.max_pages, replace(settings, secret=key)))


def with_keys(config: SearchConfig, test_freq: int) -> SearchConfig:
    """The keys that this run needs taken from the environment. Raises ValueError naming the variable not set."""
    if is_simulated(config):
        config = replace(config, api_key=_resolved_key("retriever.api_key", config.api_key))
    if GOOGLE in validation_engines(config, test_freq):
        key = _resolved_key("retriever.google.api_key", config.google.api_key)
        config = replace(config, google=replace(config.google, api_key=key))
    return config


def _resolved_key(name: str, key: str) -> str:
    """``env:NAME`` as the value of that environment variable."""
    if not key.startswith(_ENVIRONMENT_VARIABLE):
        return key
    variable = key.removeprefix(_ENVIRONMENT_VARIABLE)
    if not os.environ.get(variable):
        raise ValueError(f"{name}: the environment variable {variable} is not set")
    return os.environ[variable]


def problems(config: SearchConfig, plan: RunPlan) -> list[str]:
    """What is missing for the searches of this run, as far as the configuration and the environment tell."""
    found: list[str] = []
    engines = _used_engines(config, plan)
    if is_simulated(config):
        found += _simulation_problems(config)
    if GOOGLE in engines:
        found += _google_problems(config)
    if WIKI in engines:
        found += _wiki_problems(config.wiki.address)
    return found


def _simulation_problems(config: SearchConfig) -> list[str]:
    found = []
    if not config.ip and not config.embedded_model:
        found.append(
            "no simulation server: give IP (retriever.ip), or a checkpoint to serve (retriever.embedded_model)"
        )
    template = config.prompt_template or config.search_mode
    found += _refused(lambda: load_simulation_template(template), "retriever.prompt_template: {}")
    found += _refused(lambda: parse_addresses(config.ip or "localhost"), "retriever.ip: {}")
    return found + _refused(lambda: _resolved_key("retriever.api_key", config.api_key), "{}")


def _google_problems(config: SearchConfig) -> list[str]:
    said = "Google search needs a SerpApi key ({}): set it, or use another SEARCH_MODE and SEARCH_ENGINE"
    return _refused(lambda: _resolved_key("retriever.google.api_key", config.google.api_key), said)


def _wiki_problems(address: str) -> list[str]:
    said = "the wiki retriever needs retriever.wiki.address: {}"
    return _refused(lambda: parse_addresses(address, _WIKI_PORT, _WIKI_PATH), said)


def _refused(check: Callable[[], object], said: str) -> list[str]:
    """What is wrong according to ``check``, put into ``said``; nothing where it passes."""
    try:
        check()
    except ValueError as error:
        return [said.format(error)]
    return []


def announcements(config: SearchConfig, plan: RunPlan) -> list[str]:
    """How many searches and paid calls there may be, factor by factor; and that the validation's engine is off,
    where it is."""
    lines: list[str] = []
    if config.search_mode == GOOGLE and plan.total_steps > 0:
        lines.append(_training_calls(config, plan))
    if GOOGLE in _used_engines(config, plan) and plan.validations > 0:
        lines.append(_validation_calls(config, plan))
    if lines:
        lines.append(
            "a search takes a further paid call for each page with fewer results than topk, "
            f"{config.google.max_pages} calls in all (retriever.google.max_pages); retries and trajectories run anew "
            "come on top of these numbers, and the trial search before the run; "
            "a query that a rollout worker repeats takes none"
        )
    if config.search_engine != "none" and config.search_engine not in _used_engines(config, plan):
        why = "it runs only where trainer.test_freq is above 0"
        if plan.validations == 0:
            why = "there is nothing to validate on (data.val_files)"
        lines.append(f"validation with {IN_WORDS[config.search_engine]} is off: {why}")
    return lines


def _training_calls(config: SearchConfig, plan: RunPlan) -> str:
    searches = plan.trajectories_per_step * plan.total_steps * config.max_turns
    return (
        f"Google search, training: {_up_to(searches, config)} = {plan.trajectories_per_step:,} trajectories a step"
        f" x {plan.total_steps:,} steps x {config.max_turns} searches a trajectory (retriever.max_turns)"
    )


def _validation_calls(config: SearchConfig, plan: RunPlan) -> str:
    validations, when = plan.validations, f"trainer.test_freq={plan.test_freq}"
    if config.search_mode != GOOGLE and plan.full_validations < plan.validations:
        validations, when = plan.full_validations, "those of every mode: trainer.val_every_mode=false"
    searches = plan.validation_rows * plan.validation_samples * config.max_turns * validations
    return (
        f"Google search, validation: {_up_to(searches, config)} = {plan.validation_rows:,} rows"
        f" x {plan.validation_samples} trajectories a row x {config.max_turns} searches a trajectory"
        f" (retriever.max_turns) x {validations} validations ({when})"
    )


def _up_to(searches: int, config: SearchConfig) -> str:
    return f"up to {searches:,} searches (up to {searches * config.google.max_pages:,} paid calls)"
