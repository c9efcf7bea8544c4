"""Signs of collapse that only a search environment can see."""

from __future__ import annotations

from verl.agent_loop.alarm_rule import AlarmRule
from zerosearch.config import SearchAlarmConfig


def search_rules(config: SearchAlarmConfig) -> list[AlarmRule]:
    """Over the metrics of `zerosearch.metrics`; what a policy must first learn is watched once it has."""
    return [*_action_rules(config), *_query_rules(config)]


def _action_rules(config: SearchAlarmConfig) -> list[AlarmRule]:
    return [
        AlarmRule(
            name="search_answer_rate",
            metric="search/answer_rate",
            side="below",
            bound=config.answer_rate,
            armed_first=True,
            meaning="trajectories that used to answer now end without an answer",
            remedy="try a lower actor.optim.lr; where status/truncated rose as well, a larger data.max_response_length",
        ),
        AlarmRule(
            name="search_valid_actions",
            metric="search/valid_action_share",
            side="below",
            bound=config.valid_actions,
            armed_first=True,
            meaning="the policy forgets the format of searches and answers",
            remedy="try a lower actor.optim.lr or a larger actor.kl_loss_coef, and read trajectories/",
        ),
        AlarmRule(
            name="search_searches",
            metric="search/searches",
            side="below",
            bound=config.searches,
            armed_first=True,
            meaning="the policy has given up searching",
            remedy="see search/gold_in_documents and search/noise_probability: documents that do not help teach "
            "this, and a lower retriever.end_threshold or actor.optim.lr may undo it",
        ),
    ]


def _query_rules(config: SearchAlarmConfig) -> list[AlarmRule]:
    return [
        AlarmRule(
            name="search_repeated_queries",
            metric="search/repeated_query_share",
            side="above",
            bound=config.repeated_queries,
            meaning="the policy asks the same again instead of using what it was shown",
            remedy="read trajectories/; retriever.draw=trajectory leaves nothing to gain by repeating",
        ),
        AlarmRule(
            name="search_lost",
            metric="search/survival/1",
            side="below",
            bound=config.searches_lost,
            meaning="trajectories that search are lost to failing servers, which teaches not to search",
            remedy="see failures in trajectories/ and the servers' logs; try a longer retriever.deadline or a lower "
            "retriever.max_concurrency",
        ),
    ]
