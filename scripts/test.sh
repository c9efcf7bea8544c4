#!/usr/bin/env bash
# Sets itself up, then lints, type-checks and tests: `bash scripts/test.sh [--slow] [pytest arguments]`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh test
bin="${ZEROSEARCH_VENV:-.venv}/bin"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
exec "$bin/python" -m pytest "$@"
