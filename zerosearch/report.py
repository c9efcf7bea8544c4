"""What a person reads of a search run: the part of each step's line, of the closing table, of summary.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl.agent_loop.base import ScoredRow, Validation, scores_by_row
from verl.utils.intervals import bootstrap_mean

NOISE_FREE = "noise_0"
END_NOISE = "noise_end"

_FIGURES = {
    "searches per question": "val/{mode}/search/searches",
    "answered": "val/{mode}/search/answer_rate",
    "query sensitivity": "val/search/query_sensitivity",
}
_SUFFIXES = {NOISE_FREE: "", END_NOISE: "_end_noise"}
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


def figures(validation: Mapping[str, float], mode: str) -> dict[str, str]:
    """Lines of the closing table from the last validation, as far as they depend on it in ``mode``."""
    keys = {name: key.format(mode=mode) for name, key in _FIGURES.items()}
    lines = {name: f"{validation[key]:.3f}" for name, key in keys.items() if key in validation}
    by_hops = f"val/{mode}/search/searches_hops_"
    hops = sorted(key.removeprefix(by_hops) for key in validation if key.startswith(by_hops))
    return lines | {f"searches, {n}-hop questions": f"{validation[by_hops + n]:.3f}" for n in hops}


def summary(before: Validation, after: Validation) -> dict[str, float]:
    """Held-out F1 and EM before and after, and the lower 95 % bound of the F1 gain.

    Keys without a suffix are of noise 0, those with ``_end_noise`` of the end noise, those with the name
    of a real engine of that engine: scores of different search backends never share a key.
    ``held_out_n`` counts data rows; rows scored on one side only do not enter the gain.
    """
    modes = dict.fromkeys([*before, *after]) or {NOISE_FREE: None}
    return {k: v for mode in modes for k, v in _summary_of(mode, before.get(mode, ()), after.get(mode, ())).items()}


def _summary_of(mode: str, before: Sequence[ScoredRow], after: Sequence[ScoredRow]) -> dict[str, float]:
    suffix = _SUFFIXES.get(mode, f"_{mode}")
    old, new = scores_by_row(before, "f1"), scores_by_row(after, "f1")
    found: dict[str, float] = {}
    if mode != END_NOISE:
        gain = bootstrap_mean([new[row] - old[row] for row in new if row in old])
        found = {f"held_out_n{suffix}": len(new), f"held_out_gain_low95{suffix}": gain.low}
    for when, rows in (("before", before), ("after", after)):
        for score in ("f1", "em"):
            by_row = scores_by_row(rows, score)
            if by_row:
                found[f"held_out_{score}_{when}{suffix}"] = sum(by_row.values()) / len(by_row)
    return found
