"""The embedded quickstart: a closed world, two starter models that fit into a repository, and their builder.

The simulation LLM knows the world's table of facts by heart; the policy can search in this world,
mostly does not, and learns to. `python -m zerosearch.quickstart.build` makes everything from seeds.
The policy generalises to entities it never saw, within this world: it is no general reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Assets:
    """Where the parts of a built quickstart lie."""

    root: Path

    @property
    def policy(self) -> Path:
        return self.root / "policy"

    @property
    def simulator(self) -> Path:
        return self.root / "simulator"

    @property
    def train_data(self) -> Path:
        return self.root / "data" / "train.parquet"

    @property
    def test_data(self) -> Path:
        return self.root / "data" / "test.parquet"

    @property
    def policy_prompt(self) -> Path:
        return self.root / "policy_prompt.txt"

    @property
    def simulation_prompt(self) -> Path:
        return self.root / "simulation_prompt.txt"

    @property
    def corpus(self) -> Path:
        return self.root / "corpus.jsonl"


ASSETS = Assets(Path(__file__).parent / "assets")
"""What is shipped: the build of seed 1."""
