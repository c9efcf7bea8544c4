# Sourced by train_*.sh: set-up, then the training program in the prepared environment.
launch() {
  local algorithm="$1" root start
  shift
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  start=$(date +%s)
  bash "$root/scripts/setup.sh" train || exit $?
  export ZEROSEARCH_SETUP_SECONDS=$(($(date +%s) - start))
  ZEROSEARCH_STARTED=$(date +%s.%N)
  export ZEROSEARCH_STARTED
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
  exec "${ZEROSEARCH_VENV:-$root/.venv}/bin/python" -m zerosearch.launch "$algorithm" "$@"
}
