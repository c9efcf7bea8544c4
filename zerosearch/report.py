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
    """Held-out F1 and EM before and after, at noise 0 and at the end noise, and the lower 95 % bound of the F1
    gain at noise 0.

    ``held_out_n`` counts data rows; rows scored on one side only do not enter the gain.
    """
    old, new = (scores_by_row(validation.get(NOISE_FREE, ()), "f1") for validation in (before, after))
    gains = [new[row] - old[row] for row in new if row in old]
    found: dict[str, float] = {"held_out_n": len(new), "held_out_gain_low95": bootstrap_mean(gains).low}
    for when, validation in (("before", before), ("after", after)):
        for mode, suffix in ((NOISE_FREE, ""), (END_NOISE, "_end_noise")):
            for score in ("f1", "em"):
                rows = scores_by_row(validation.get(mode, ()), score)
                if rows:
                    found[f"held_out_{score}_{when}{suffix}"] = sum(rows.values()) / len(rows)
    return found
