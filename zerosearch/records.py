"""What a trajectory did with its searches: read by metrics, probe and whoever reads a run's dump."""

from __future__ import annotations

from dataclasses import dataclass

from zerosearch.actions import InvalidKind
from zerosearch.reward import Scores
from zerosearch.search.backend import Label

NO_SCORES = Scores()


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """One search that was answered.

    ``documents`` and ``gold_in_documents`` are those the policy saw; ``cut`` counts documents beyond
    topk, ``truncated`` says whether the documents were shortened to fit ``max_observation_length``.
    ``attempts`` is 0 where the answer was remembered. ``latency`` in seconds.
    ``engine_calls`` counts requests to a real engine, further pages and retries included.
    """

    turn: int
    query: str
    normalized_query: str
    label: Label
    backend: str
    documents: tuple[str, ...]
    cut: int
    truncated: bool
    gold_in_documents: bool
    attempts: int
    latency: float
    engine_calls: int = 0


@dataclass(frozen=True, slots=True)
class Episode:
    """One trajectory.

    ``invalid`` lists the generations without an action in order; ``refused_searches`` counts
    searches in a last generation, which were not run; ``forged_information`` the <information>
    tags that the policy wrote. ``failed_query`` is the search at which the infrastructure failed.
    """

    question: str
    golden_answers: tuple[str, ...]
    hops: int | None
    noise_probability: float
    searches: tuple[SearchRecord, ...] = ()
    invalid: tuple[InvalidKind, ...] = ()
    refused_searches: int = 0
    forged_information: int = 0
    answer: str | None = None
    scores: Scores = NO_SCORES
    failed_query: str | None = None

    @property
    def searches_begun(self) -> int:
        return len(self.searches) + (self.failed_query is not None)

    @property
    def repeated_queries(self) -> int:
        """Searches whose normalised query stood in an earlier one of the same trajectory."""
        return len(self.searches) - len({search.normalized_query for search in self.searches})

    @property
    def valid_actions(self) -> int:
        return len(self.searches) + self.refused_searches + (self.answer is not None)
