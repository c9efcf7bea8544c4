"""The section ``retriever`` of the configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from verl.utils.config import ReadableAsMapping, SecretReference
from zerosearch.actions import ThinkMode
from zerosearch.prompts import CORRECTIVE_MESSAGE
from zerosearch.reward import Metric
from zerosearch.search.noise import Draw
from zerosearch.search.wiki import WikiProtocol

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
SearchMode = Literal["simulate_sft", "simulate_prompt", "google", "wiki"]
EngineName = Literal["none", "google", "wiki"]
Probability = Annotated[float, Field(ge=0, le=1)]


_SAFE_URL = r"https://[^\s?#@]+|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?(/[^\s?#@]*)?"


def _safe_url(url: str) -> str:
    """A key travels with each request: encrypted, unless to this machine."""
    if not re.fullmatch(_SAFE_URL, url):
        raise ValueError(
            "the key travels with each request: give https://HOST, or http:// to this machine (localhost, 127.0.0.1, "
            "[::1]); no user, query or fragment"
        )
    return url


@dataclass(frozen=True)
class EmbeddedConfig(ReadableAsMapping):
    """The server started for ``embedded_model``. ``max_model_len`` null: what the model
    allows, at most 4096."""

    max_num_seqs: PositiveInt = 128
    max_model_len: PositiveInt | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    def server_options(self) -> list[str]:
        """As command-line options of ``zerosearch.simulation.server``."""
        options = ["--max-num-seqs", str(self.max_num_seqs), "--dtype", self.dtype]
        return options + ([] if self.max_model_len is None else ["--max-model-len", str(self.max_model_len)])


@dataclass(frozen=True)
class GoogleConfig(ReadableAsMapping):
    """Google through SerpApi. ``api_key``: ``env:NAME``, the environment variable that holds the key; the key
    itself is refused, because configurations are saved. ``max_pages``: paid requests of one search at most,
    where a page has fewer than topk results."""

    base_url: Annotated[str, AfterValidator(_safe_url)] = "https://serpapi.com"
    api_key: SecretReference = field(default="env:SER_API_KEY", repr=False)
    max_pages: PositiveInt = 3


@dataclass(frozen=True)
class WikiConfig(ReadableAsMapping):
    """A retrieval server: ``address`` as ``retriever.ip``, with port 6002 and path /retrieve where absent;
    ``protocol`` auto tries both once per server (`zerosearch.search.wiki`)."""

    address: str = ""
    protocol: WikiProtocol = "auto"


@dataclass(frozen=True)
class SearchAlarmConfig(ReadableAsMapping):
    """Signs of collapse in the search metrics, beside those of ``trainer.alarms``, whose ``steps`` holds for
    them; null switches one off."""

    answer_rate: Probability | None = 0.6
    valid_actions: Probability | None = 0.6
    searches: Annotated[float, Field(ge=0)] | None = 0.2
    repeated_queries: Probability | None = 0.5
    searches_lost: Probability | None = 0.9


@dataclass(frozen=True)
class SearchConfig(ReadableAsMapping):
    """How the policy searches.

    ``search_mode``: what it searches in training, a simulation LLM or a real engine; with a real one
    there is no noise and no curriculum. ``search_engine``: the real engine that validation uses as well
    where ``trainer.test_freq`` is above 0. ``google`` and ``wiki`` say how these are reached.

    ``ip``: addresses of the simulation servers (host, host:port or URL, comma-separated; port 6001
    and path /v1 where absent). Where it is empty, ``embedded_model`` (a checkpoint or ``pkg://…``)
    is served by this run itself. ``simulation_llm``: the model name to ask for; empty asks the
    server. ``api_key``: ``env:NAME``, the environment variable that holds its key; never the key itself,
    which would be saved with the configuration.

    ``prompt_template``: what the simulation LLM is asked, a file or ``pkg://…``; empty takes the
    packaged one of the mode. ``temperature``, ``top_p`` and ``max_tokens`` are its sampling.

    ``start_threshold`` and ``end_threshold``: noise probability at the first and at the last step;
    ``exp_base``: how late it rises (`zerosearch.curriculum`). ``draw``: a repeated query meets the
    same documents (``trajectory``) or a new coin (``call``).

    ``max_turns`` searches per trajectory, of ``topk`` documents. ``think`` strict: an action inside
    an open <think> is none. ``corrective_message`` follows an invalid action.

    ``request_timeout`` seconds per attempt, ``deadline`` seconds per call with all retries,
    pauses apart; the run pauses while no simulation server answers and ends after ``outage_deadline``
    seconds of that; ``max_concurrency`` requests at once per rollout worker. ``probe_samples`` trajectories at most
    measure query sensitivity after a validation; 0 measures nothing. ``alarms``: bounds of the search
    environment's signs of collapse.
    """

    search_mode: SearchMode = "simulate_sft"
    search_engine: EngineName = "none"
    google: GoogleConfig = field(default_factory=GoogleConfig)
    wiki: WikiConfig = field(default_factory=WikiConfig)
    ip: str = ""
    embedded_model: str = ""
    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    simulation_llm: str = ""
    api_key: SecretReference = field(default="", repr=False)
    prompt_template: str = ""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.8
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: PositiveInt = 600
    start_threshold: Probability = 0.0
    end_threshold: Probability = 0.5
    exp_base: Annotated[float, Field(ge=1)] = 4.0
    draw: Draw = "trajectory"
    max_turns: NonNegativeInt = 5
    topk: PositiveInt = 5
    think: ThinkMode = "lenient"
    corrective_message: Annotated[str, Field(min_length=1)] = CORRECTIVE_MESSAGE
    reward_metric: Metric = "f1"
    request_timeout: PositiveFloat = 120.0
    deadline: PositiveFloat = 240.0
    outage_deadline: PositiveFloat = 600.0
    max_concurrency: PositiveInt = 256
    probe_samples: NonNegativeInt = 64
    alarms: SearchAlarmConfig = field(default_factory=SearchAlarmConfig)
