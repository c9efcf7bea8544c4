"""``python -m verl.trainer.main_ppo key=value …``: compose → validate → preflight → start → train → report."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.trainer.compose import Composed, compose_config

USAGE = """\
usage: python -m verl.trainer.main_ppo [--help] [--dry-run] key=value …

  key=value        any key of the configuration below (Hydra's override syntax)
  +preset=NAME     a whole set of values; quickstart is the embedded closed world
  --dry-run        check and print the configuration, start nothing
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a complete run, 1 after a failure, 2 for wrong input, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = {a for a in arguments if a in ("--help", "-h", "--dry-run")}
    try:
        composed = compose_config([a for a in arguments if a not in flags])
        if flags & {"--help", "-h"}:
            return _help(composed)
        return _dry_run(composed) if "--dry-run" in flags else _train(composed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _help(composed: Composed) -> int:
    from verl.trainer.setup import environment_config

    environment_config(composed.config)  # a secret in the environment's section is refused, not shown
    print(USAGE + "\nThe configuration with these overrides:\n\n" + composed.to_yaml())
    return 0


def _dry_run(composed: Composed) -> int:
    from verl.trainer.preflight import dry_problems, first_prompt, refuse
    from verl.trainer.setup import environment_config

    environment_config(composed.config)
    refuse(dry_problems(composed.config))
    print(composed.to_yaml())
    print(first_prompt(composed.config))
    print("dry run: the configuration is valid; nothing was started")
    return 0


def _train(composed: Composed) -> int:
    from verl.trainer.run import run_training

    return run_training(composed)


if __name__ == "__main__":
    sys.exit(main())
