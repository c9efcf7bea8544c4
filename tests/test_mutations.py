"""Faults of earlier systems, put back one at a time: a test must fail for each."""

from __future__ import annotations

import pytest

from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import Mutation
from tests.mutations.session import mutated, unmutated


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_fault_put_back_is_noticed(mutation: Mutation) -> None:
    sound = unmutated(mutation.tests)
    assert sound.exit_code == pytest.ExitCode.OK, sound.output
    outcome = mutated(mutation)
    assert outcome.exit_code == pytest.ExitCode.TESTS_FAILED, f"no test noticed: {mutation.fault}\n{outcome.output}"
    assert outcome.failures, f"nothing failed in a test's own body:\n{outcome.output}"
    assert not outcome.failures[0].broken, f"the fault does not fit the code any more:\n{outcome.output}"
