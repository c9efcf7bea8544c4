"""Every fault that the tests are known to notice."""

from __future__ import annotations

from tests.mutations import estimators, rollouts, updates
from tests.mutations.mutation import Mutation

MUTATIONS: dict[str, Mutation] = {
    mutation.name: mutation for mutation in (*rollouts.MUTATIONS, *estimators.MUTATIONS, *updates.MUTATIONS)
}
