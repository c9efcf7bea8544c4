"""``python -m tests.mutations [NAME...]`` puts faults back one at a time and prints which test noticed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import Mutation
from tests.mutations.session import mutated, unmutated


def main(names: Sequence[str]) -> int:
    """The number of faults that no test noticed. Raises ValueError for an unknown name."""
    unknown = [name for name in names if name not in MUTATIONS]
    if unknown:
        raise ValueError(f"unknown mutations {unknown}; known: {', '.join(MUTATIONS)}")
    survivors = 0
    for name in names or MUTATIONS:
        noticed, line = judge(MUTATIONS[name])
        survivors += not noticed
        print(f"{'killed  ' if noticed else 'SURVIVED'}  {name:<52}  {line}", flush=True)
    print(f"{survivors} faults survived" if survivors else "every fault was noticed")
    return survivors


def judge(mutation: Mutation) -> tuple[bool, str]:
    """Whether a test failed because of the fault, and which."""
    if unmutated(mutation.tests).exit_code:
        return False, "the tests fail without it too"
    outcome = mutated(mutation)
    if outcome.exit_code != 1 or not outcome.failures:
        return False, outcome.output.strip().rpartition("\n")[2]
    (first,) = outcome.failures
    return not first.broken, f"{first.test}: {first.message}"


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
