#!/usr/bin/env bash
# Trains with REINFORCE and a leave-one-out baseline. Without arguments: the embedded quickstart. `--help` lists the arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/launch.sh"
launch reinforce "$@"
