"""Faults of earlier systems, put back one at a time: a test must fail for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import Mutation
from tests.mutations.session import Failure, mutated, unmutated


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_fault_put_back_is_noticed(mutation: Mutation) -> None:
    sound = unmutated(mutation.tests)
    assert sound.exit_code == pytest.ExitCode.OK, sound.output
    outcome = mutated(mutation)
    assert outcome.exit_code == pytest.ExitCode.TESTS_FAILED, f"no test noticed: {mutation.fault}\n{outcome.output}"
    assert outcome.failures, f"nothing failed in a test's own body:\n{outcome.output}"
    assert not outcome.failures[0].broken, f"the fault does not fit the code any more:\n{outcome.output}"


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_every_fault_can_still_be_put_back(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it replaces exists, and so do the files of the tests that are to notice."""
    mutation.apply(monkeypatch)
    assert all(Path(test.partition("::")[0]).is_file() for test in mutation.tests)


@pytest.mark.parametrize(
    ("path", "message", "broken"),
    [
        ("/repository/tests/zerosearch/test_reward.py", "assert 1 == 0", False),
        ("/repository/zerosearch/text.py", "TypeError: normalize() argument 2 must be str, not None", False),
        ("/repository/tests/mutations/updates.py", "AttributeError: no attribute", True),
        ("/repository/verl/a.py", "TypeError: f() got an unexpected keyword argument 'x'", True),
        ("/repository/verl/a.py", "TypeError: f() takes 1 positional argument but 2 were given", True),
        ("/repository/verl/a.py", "TypeError: f() missing 1 required positional argument: 'x'", True),
    ],
)
def test_a_fault_that_no_longer_fits_the_code_proves_nothing(path: str, message: str, broken: bool) -> None:
    assert Failure("test", path, message).broken is broken
