"""Makes the quickstart from seeds: `python -m zerosearch.quickstart.build`.

One seed takes about ten CPU-minutes. The first one becomes the assets; further seeds say how far
the figures of the report depend on luck.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from zerosearch.quickstart import ASSETS, Assets
from zerosearch.quickstart.dataset import write_data
from zerosearch.quickstart.learning import measure_controls, measure_learning
from zerosearch.quickstart.quality import measure_policy, measure_simulator
from zerosearch.quickstart.recipes import train_policy, train_simulator
from zerosearch.quickstart.report import Measure, as_json, as_table
from zerosearch.quickstart.templates import POLICY_PROMPT, SIMULATION_PROMPT
from zerosearch.quickstart.tokenizer import train_tokenizer
from zerosearch.quickstart.world import build_world

logger = logging.getLogger(__name__)

# The two models must not begin alike.
_POLICY_SEED_OFFSET = 1000


def build_assets(seed: int, assets: Assets) -> None:
    """Everything that is shipped, from one seed, into a directory."""
    world = build_world(seed)
    tokenizer = train_tokenizer(world)
    assets.root.mkdir(parents=True, exist_ok=True)
    write_data(world, assets)
    assets.policy_prompt.write_text(POLICY_PROMPT, encoding="utf-8")
    assets.simulation_prompt.write_text(SIMULATION_PROMPT, encoding="utf-8")
    logger.info("seed %d: training the simulation LLM", seed)
    _save(train_simulator(world, tokenizer, seed), tokenizer, assets.simulator)
    logger.info("seed %d: training the policy", seed)
    _save(train_policy(world, tokenizer, seed + _POLICY_SEED_OFFSET), tokenizer, assets.policy)


def measure_assets(seed: int, assets: Assets) -> list[Measure]:
    """The figures of built assets, read back from their directory."""
    world = build_world(seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(assets.policy)
    policy = Qwen2ForCausalLM.from_pretrained(assets.policy)
    simulator = Qwen2ForCausalLM.from_pretrained(assets.simulator)
    logger.info("seed %d: measuring", seed)
    return [
        *measure_simulator(world, simulator, tokenizer, seed),
        *measure_policy(world, policy, simulator, tokenizer, seed),
    ]


def _save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Command line."""
    arguments = _parser().parse_args()
    if arguments.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {arguments.seeds}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # Models this small lose more to the meeting of threads than they gain.
    torch.set_num_threads(1)
    report: dict[int, list[Measure]] = {}
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        assets = Assets(arguments.out if seed == arguments.seed else arguments.further / f"seed-{seed}")
        begin = time.process_time()
        if not arguments.measure_only:
            build_assets(seed, assets)
        built = time.process_time() - begin
        report[seed] = [
            *measure_assets(seed, assets),
            *(measure_learning(assets, seed) if arguments.learning else []),
            *(measure_controls(assets, seed) if arguments.controls else []),
        ]
        logger.info("seed %d: %.0f CPU-seconds to build, in %s", seed, built, assets.root)
        _write_report(report, arguments.report)
    print(as_table(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zerosearch.quickstart.build", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=ASSETS.root, help="where the first seed's assets go (default: the package)")
    add("--seed", type=int, default=1, help="the first seed")
    add("--seeds", type=int, default=1, help="how many seeds to build and measure")
    add("--further", type=Path, default=Path("runs/quickstart-build"), help="where further seeds' assets go")
    add("--report", type=Path, default=Path("runs/quickstart-build/report.json"), help="a table in .md lies beside it")
    add("--measure-only", action="store_true", help="measure what was built before")
    add("--learning", action="store_true", help="also measure what GRPO makes of each seed")
    add("--controls", action="store_true", help="also train where there is nothing to learn")
    return parser


def _write_report(report: dict[int, list[Measure]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(as_table(report), encoding="utf-8")


if __name__ == "__main__":
    main()
