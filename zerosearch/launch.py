"""``train_grpo.sh KEY VALUE … key=value …``: the documented arguments as configuration overrides."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from verl.trainer.aliases import rewrite_overrides
from verl.trainer.compose import compose_config
from verl.trainer.main_ppo import main as train
from verl.utils.dataset.row_files import SUFFIXES
from zerosearch.run_name import experiment_name
from zerosearch.simulation.pool import parse_addresses


@dataclass(frozen=True)
class Argument:
    """One KEY: what a person reads of it, and the overrides a value becomes."""

    help: str
    default: str
    overrides: Callable[[str], list[str]]


def _number(kind: type[int] | type[float], low: float, high: float = float("inf")) -> Callable[[str], str]:
    def parse(value: str) -> str:
        try:
            number = kind(value)
        except ValueError:
            raise ValueError(f"{value!r} is not {'an integer' if kind is int else 'a number'}") from None
        if not low <= number <= high:
            raise ValueError(f"{value} is out of range: {low} to {high}")
        return str(number)

    return parse


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} is none of {', '.join(choices)}{_nearest(value, choices)}")
        return value

    return parse


def _to(key: str, parse: Callable[[str], str] = str) -> Callable[[str], list[str]]:
    return lambda value: [f"{key}={_quoted(parse(value))}"]


def _quoted(value: str) -> str:
    """A value as Hydra reads it back unchanged: quoted wherever its grammar would take it apart."""
    if value and all(c.isalnum() or c in "/_-." for c in value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _given(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    return value


def _addresses(value: str) -> str:
    parse_addresses(value)
    return value


def _data_files(value: str) -> list[str]:
    """A directory with train.parquet and test.parquet, a file, or a comma-separated list of either."""
    train_files: list[str] = []
    val_files: list[str] = []
    for part in map(str.strip, _given(value).removeprefix("[").removesuffix("]").split(",")):
        if Path(part).suffix in SUFFIXES and not Path(part).is_dir():
            train_files.append(_given(part))
            continue
        train_files.append(str(Path(_given(part)) / "train.parquet"))
        test_file = Path(part) / "test.parquet"
        if test_file.is_file() or not Path(part).is_dir():
            val_files.append(str(test_file))
    overrides = [f"data.train_files=[{','.join(map(_quoted, train_files))}]"]
    return overrides + ([f"data.val_files=[{','.join(map(_quoted, val_files))}]"] if val_files else [])


SEARCH_MODES = ("simulate_prompt", "simulate_sft", "google", "wiki")
DEFAULT_IP = "localhost"

ARGUMENTS: dict[str, Argument] = {
    "NUM_GPUS_PER_NODE": Argument(
        "GPUs on each node; 0 trains on CPU", "0", _to("trainer.n_gpus_per_node", _number(int, 0))
    ),
    "NNODES": Argument("nodes", "1", _to("trainer.nnodes", _number(int, 1))),
    "MODEL_PATH": Argument(
        "the policy: a checkpoint directory, or ORG/NAME on the hub", "", _to("actor_rollout_ref.model.path", _given)
    ),
    "DATA_PATH": Argument(
        "directory with train.parquet and test.parquet, a file (.parquet, .jsonl), or a list a,b", "", _data_files
    ),
    "TOTAL_STEPS": Argument(
        "rollouts, each followed by its update", "200", _to("trainer.total_training_steps", _number(int, 1))
    ),
    "IP": Argument(
        "search server(s): host, host:port or URL, comma-separated",
        DEFAULT_IP,
        _to("retriever.ip", _addresses),
    ),
    "SEARCH_MODE": Argument(
        "what the policy searches in training: simulate_sft, simulate_prompt; google, wiki (real search)",
        "simulate_sft",
        _to("retriever.search_mode", _choice(*SEARCH_MODES)),
    ),
    "SIMULATION_LLM": Argument(
        "model the server must serve (empty: ask it); without IP a local checkpoint, served here",
        "",
        _to("retriever.simulation_llm"),
    ),
    "START_THRESHOLD": Argument(
        "noise probability at the first step", "0", _to("retriever.start_threshold", _number(float, 0, 1))
    ),
    "END_THRESHOLD": Argument(
        "noise probability at the last step", "0.5", _to("retriever.end_threshold", _number(float, 0, 1))
    ),
    "SEARCH_ENGINE": Argument(
        "search engine of the validation: google, wiki; none is that of the training",
        "none",
        _to("retriever.search_engine", _choice("google", "wiki", "none")),
    ),
    "MAX_TURNS": Argument("searches per trajectory", "5", _to("retriever.max_turns", _number(int, 1))),
    "TOPK": Argument("documents per search", "5", _to("retriever.topk", _number(int, 1))),
}


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line: KEY VALUE pairs, Hydra overrides in their order, flags."""

    pairs: dict[str, str]
    overrides: tuple[str, ...]
    flags: tuple[str, ...]


def parse(arguments: Sequence[str]) -> CommandLine:
    """Raises ValueError for unknown, doubled or valueless keys, naming the nearest valid one."""
    pairs: dict[str, str] = {}
    overrides: list[str] = []
    flags: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word.startswith("-"):
            flags.append(_flag(word))
        elif "=" in word or word.startswith(("+", "~")):
            overrides.append(_override(word))
        else:
            pairs[_key(word, pairs)] = _value(word, waiting)
    return CommandLine(pairs, tuple(overrides), tuple(flags))


def _flag(word: str) -> str:
    if word not in ("--help", "-h", "--dry-run"):
        raise ValueError(f"unknown option {word}{_nearest_key(word)}; options: --help, --dry-run")
    return word


def _override(word: str) -> str:
    key, _, value = word.partition("=")
    if _as_key(key) in ARGUMENTS:
        raise ValueError(f"{word}: write {_as_key(key)} {value or 'VALUE'}, without an equals sign")
    return word


def _key(word: str, given: dict[str, str]) -> str:
    if word not in ARGUMENTS:
        dotted = f" (an override is written {word}=VALUE)" if "." in word else ""
        raise ValueError(f"unknown key {word!r}{_nearest_key(word) or dotted}; keys: {', '.join(ARGUMENTS)}")
    if word in given:
        raise ValueError(f"{word} is given twice")
    return word


def _as_key(word: str) -> str:
    return word.lstrip("-+~").upper().replace("-", "_")


def _nearest_key(word: str) -> str:
    """The key most like ``word`` however it is written, else one that contains it."""
    wanted = _as_key(word)
    parts = [key for key in ARGUMENTS if wanted and wanted in key]
    return _nearest(wanted, list(ARGUMENTS)) or (f" (did you mean {parts[0]}?)" if parts else "")


def _value(key: str, waiting: list[str]) -> str:
    if not waiting or waiting[0] in ARGUMENTS or waiting[0].startswith("--") or _is_override(waiting[0]):
        raise ValueError(f"{key} has no value: write {key} VALUE")
    return waiting.pop(0)


def _is_override(word: str) -> bool:
    """Dotted Hydra keys; a URL with a query or a quoted path may well contain an equals sign."""
    key, equals, _ = word.partition("=")
    return bool(equals) and key.lstrip("+~").replace(".", "").replace("_", "").isalnum() and "." in key


def _nearest(word: str, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, choices, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def is_quickstart(line: CommandLine) -> bool:
    """Whether model and data are the embedded world's: by its preset, or because the command line names none."""
    preset = _given_overrides(line).get("preset")
    if preset is not None:
        return "quickstart" in preset
    own = {"actor_rollout_ref.model.path", "data.train_files"} & set(_given_overrides(line))
    return not own and not {"MODEL_PATH", "DATA_PATH"} & set(line.pairs)


def _given_overrides(line: CommandLine) -> dict[str, str]:
    """By our own names of their keys; the last one of each key, as Hydra takes it."""
    parts = (override.lstrip("+~").partition("=") for override in rewrite_overrides(line.overrides))
    return {key: value for key, _, value in parts}


def to_overrides(line: CommandLine, algorithm: str) -> list[str]:
    """The command line as overrides: preset, algorithm, documented arguments, then the user's own overrides.

    Raises ValueError for wrong values, and for an argument whose key is also overridden.
    """
    overrides = [f"algorithm={algorithm}"]
    if is_quickstart(line) and "preset" not in _given_overrides(line):
        overrides.insert(0, "+preset=quickstart")
    for key, value in _with_server(line).items():
        try:
            made = _served_here(line) if key == "SIMULATION_LLM" else ARGUMENTS[key].overrides(value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
        _check_given_once(key, made, line)
        overrides += made
    return [*overrides, *_wiki_address(line), *line.overrides]


def _check_given_once(argument: str, made: Sequence[str], line: CommandLine) -> None:
    """An argument's first key is what it says; another one, as the validation files beside the training files,
    is a default that may be overridden."""
    key = made[0].partition("=")[0]
    if argument in line.pairs and key in _given_overrides(line):
        raise ValueError(f"{argument} and {key} are the same setting: give one of them")


def _wiki_address(line: CommandLine) -> list[str]:
    """Where the wiki retriever is looked for: at IP when it is what training searches; beside a simulation LLM
    on the same hosts, at its own port."""
    address = _effective(line, "IP", "retriever.ip", DEFAULT_IP)
    if _effective(line, "SEARCH_MODE", "retriever.search_mode", "simulate_sft") == "wiki":
        return [f"retriever.wiki.address={_quoted(address)}"]
    if _effective(line, "SEARCH_ENGINE", "retriever.search_engine", "none") != "wiki":
        return []
    hosts = [urlsplit(url).hostname or "" for url in parse_addresses(address)]
    return [f"retriever.wiki.address={_quoted(','.join(dict.fromkeys(map(_bracketed, hosts))))}"]


def _effective(line: CommandLine, argument: str, key: str, default: str) -> str:
    """What the command line makes of a key: by its override, else by its argument."""
    given = _given_overrides(line).get(key, "").strip("'\"")
    return given or line.pairs.get(argument) or default


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _with_server(line: CommandLine) -> dict[str, str]:
    """The pairs, with the documented IP where a simulation server is used and none is named."""
    mode = _effective(line, "SEARCH_MODE", "retriever.search_mode", "simulate_sft")
    settled = {"retriever.ip", "retriever.embedded_model", "environment"} & set(_given_overrides(line))
    named = "IP" in line.pairs or settled
    served_here = "SIMULATION_LLM" in line.pairs and _is_checkpoint(line.pairs["SIMULATION_LLM"])
    if is_quickstart(line) or named or served_here or not mode.startswith("simulate"):
        return line.pairs
    return {**line.pairs, "IP": DEFAULT_IP}


def _is_checkpoint(name: str) -> bool:
    return (Path(name) / "config.json").is_file()


def _served_here(line: CommandLine) -> list[str]:
    """A local checkpoint is served by the embedded server, unless a server's address says otherwise."""
    model = line.pairs["SIMULATION_LLM"]
    if "IP" not in line.pairs and _is_checkpoint(model):
        return [f"retriever.embedded_model={_quoted(model)}"]
    return ARGUMENTS["SIMULATION_LLM"].overrides(model)


def usage(script: str) -> str:
    rows = "\n".join(f"  {key:<18}{a.help}{f' [{a.default}]' if a.default else ''}" for key, a in ARGUMENTS.items())
    return f"""\
usage: bash {script} [KEY VALUE …] [key=value …] [--dry-run] [--help]

Without MODEL_PATH and DATA_PATH it trains the embedded quickstart. KEY VALUE pairs in any order:
{rows}

Everything else is a configuration override in Hydra's syntax, for example
  actor_rollout_ref.actor.optim.lr=2e-6 trainer.test_freq=10 data.train_batch_size=32
--dry-run checks and prints the whole configuration and starts nothing.
"""


def named_overrides(line: CommandLine, algorithm: str) -> list[str]:
    """The overrides, with an experiment name that tells all that differs unless the user gave one; prints what
    is unusual about them. Raises ValueError for what cannot be composed."""
    overrides = to_overrides(line, algorithm)
    composed = compose_config(overrides)
    retriever = composed.config.retriever
    start, end = retriever.get("start_threshold", 0), retriever.get("end_threshold", 0)
    if start > end:
        print(f"note: START_THRESHOLD {start:g} is above END_THRESHOLD {end:g}: noise falls during the run")
    if "trainer.experiment_name" in _given_overrides(line):
        return overrides
    name = experiment_name(composed.config, algorithm, is_quickstart(line), overrides)
    return [*overrides, f"trainer.experiment_name={_quoted(name)}"]


def main(algorithm: str, arguments: Sequence[str]) -> int:
    """Exit status as of ``verl.trainer.main_ppo.main``; 2 for a wrong command line."""
    try:
        line = parse(arguments)
        if {"--help", "-h"} & set(line.flags):
            print(usage(f"train_{algorithm}.sh"))
            return 0
        return train([*named_overrides(line, algorithm), *line.flags])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
