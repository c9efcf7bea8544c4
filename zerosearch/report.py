"""What a person reads of a search run: the part of each step's line, of the closing table, of summary.json."""

from __future__ import annotations

from collections.abc import Mapping

from verl.agent_loop.base import Validation, scores_by_row
from verl.utils.intervals import bootstrap_mean

NOISE_FREE = "noise_0"
END_NOISE = "noise_end"

_FIGURES = {
    "searches per question": f"val/{NOISE_FREE}/search/searches",
    "answered": f"val/{NOISE_FREE}/search/answer_rate",
    "query sensitivity": "val/search/query_sensitivity",
}
_HEADLINE = {
    "searches": "search/searches",
    "answered": "search/answer_rate",
    "valid": "search/valid_action_share",
    "noise": "search/noise_probability",
}


def headline(metrics: Mapping[str, float]) -> str:
    """The search part of the one line per step; what was not measured is left out, shortened documents are told."""
    parts = [f"{name} {metrics[key]:.3f}" for name, key in _HEADLINE.items() if key in metrics]
    shortened = metrics.get("search/truncated_observation_share", 0.0)
    if shortened:
        parts.append(f"warning: documents shortened in {shortened:.0%} of searches (rollout.max_observation_length)")
    return " | ".join(parts)


def figures(validation: Mapping[str, float]) -> dict[str, str]:
    """Lines of the closing table from the last validation."""
    lines = {name: f"{validation[key]:.3f}" for name, key in _FIGURES.items() if key in validation}
    by_hops = f"val/{NOISE_FREE}/search/searches_hops_"
    hops = sorted(key.removeprefix(by_hops) for key in validation if key.startswith(by_hops))
    return lines | {f"searches, {n}-hop questions": f"{validation[by_hops + n]:.3f}" for n in hops}


def summary(before: Validation, after: Validation) -> dict[str, float]:
    """Held-out scores at noise 0 before and after, at the end noise after, and the lower 95 % bound of the F1 gain.

    ``n`` counts data rows; rows scored on one side only do not enter the gain.
    """
    found: dict[str, float] = {"held_out_n": len(scores_by_row(after.get(NOISE_FREE, ()), "f1"))}
    for score in ("f1", "em"):
        found[f"held_out_{score}_before"] = bootstrap_mean(
            list(scores_by_row(before.get(NOISE_FREE, ()), score).values())
        ).mean
        found[f"held_out_{score}_after"] = bootstrap_mean(
            list(scores_by_row(after.get(NOISE_FREE, ()), score).values())
        ).mean
        if END_NOISE in after:
            values = list(scores_by_row(after[END_NOISE], score).values())
            found[f"held_out_{score}_after_end_noise"] = bootstrap_mean(values).mean
    old, new = (scores_by_row(v.get(NOISE_FREE, ()), "f1") for v in (before, after))
    found["held_out_gain_low95"] = bootstrap_mean([new[row] - old[row] for row in new if row in old]).low
    return found
