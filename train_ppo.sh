#!/usr/bin/env bash
# Trains with PPO, a critic and GAE. Without arguments: the embedded quickstart. `--help` lists the arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/launch.sh"
launch ppo "$@"
