"""Other names for our keys, and keys that elsewhere did nothing.

Hydra refuses keys it does not know, so overrides are rewritten before it composes. Names are those of the
original ZeroSearch, of Search-R1 and of verl.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl.trainer.foreign_keys import ALIASED_SECTIONS, ALIASES, REFUSED, STATED, VALUES
from verl.utils.config import LITERAL_SECRET, is_secret_reference

_API_KEY = re.compile(r"""api_key['"]?\s*[=:]\s*['"]?([^,}\s'"]*)""")
"""In an override, a mapping in its value, or the query of a URL."""


@dataclass
class _Rewriting:
    """The overrides so far, and by which name each of our keys was given."""

    overrides: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)


def rewrite_overrides(overrides: Sequence[str]) -> list[str]:
    """Overrides with every alias replaced, and without those that state what is always so.

    Raises ValueError for a refused key, with the reason, for a key given twice under two names, and, without
    repeating it, for a literal ``api_key``: overrides are shown and saved, those that later ones replace too.
    """
    _check_secrets(overrides)
    given = _without_old_n(overrides)
    state = _Rewriting()
    for override in given:
        _rewrite(override, state)
    return state.overrides


def _check_secrets(overrides: Sequence[str]) -> None:
    for override in overrides:
        if not all(is_secret_reference(match[1]) for match in _API_KEY.finditer(override)):
            raise ValueError(f"{override.partition('=')[0].lstrip('+~')}: {LITERAL_SECRET}")


def _rewrite(override: str, state: _Rewriting) -> None:
    key, equals, value = override.partition("=")
    name = key.lstrip("+~")
    target = _target(name)
    if _is_stated(name, value) or _is_stated(target, value):
        return
    _check_refused(name)
    if equals and state.names.setdefault(target, name) != name:
        raise ValueError(f"{name} and {state.names[target]} are the same key here: give one of them")
    mapped = VALUES.get(target, {}).get(value, value)
    changed = target != name or mapped != value
    state.overrides.append(f"{target}{equals}{mapped}" if changed else override)


def _target(name: str) -> str:
    for section, ours in ALIASED_SECTIONS.items():
        if name.startswith(section + "."):
            return ours + name.removeprefix(section)
    return ALIASES.get(name, name)


def _is_stated(name: str, value: str) -> bool:
    """Whether the override says what is always so here. Raises ValueError when it asks for something else."""
    fact = STATED.get(name)
    if fact is None:
        return False
    if value.lower() not in fact.values:
        raise ValueError(f"{name}={value} is not accepted, only {' or '.join(fact.values)}: {fact.reason}")
    return True


def _check_refused(name: str) -> None:
    for refused, reason in REFUSED.items():
        if name == refused or name.startswith(refused + "."):
            raise ValueError(f"{name} is not accepted: {reason}")


def _without_old_n(overrides: Sequence[str]) -> list[str]:
    """Where n_agent is the group size, n=1 is what it had to be there, and is no size here."""
    rollout = "actor_rollout_ref.rollout."
    values: Mapping[str, str] = {o.partition("=")[0].lstrip("+"): o.partition("=")[2] for o in overrides}
    if f"{rollout}n_agent" in values and values.get(f"{rollout}n") == "1":
        return [o for o in overrides if o.lstrip("+") != f"{rollout}n=1"]
    return list(overrides)
