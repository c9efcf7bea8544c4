#!/usr/bin/env bash
# Serves a simulation LLM over the OpenAI protocol: `bash scripts/serve_simulation.sh MODEL [options]`.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
  cat <<'TEXT'
usage: bash scripts/serve_simulation.sh MODEL [options] [-- further options of the engine]

MODEL            directory or hub name of the simulation LLM
--engine NAME    sglang, vllm or embedded (default: on an NVIDIA GPU the first of sglang and vllm that
                 PYTHON imports, else embedded)
--host ADDRESS   where to listen (default 0.0.0.0: every interface)
--port PORT      default 6001
--gpus N         GPUs of this machine to split the model over (default 1; sglang and vllm)
--print          print the command and stop
--help           this text

PYTHON names the interpreter of the engine's environment (default: .venv/bin/python, else python3).
TEXT
}
die() { printf '[serve] error: %s\n' "$*" >&2; exit 2; }

model="" engine="" host=0.0.0.0 port=6001 gpus=1 only_print=0 more=()
while [ $# -gt 0 ]; do
  case "$1" in
    --help | -h) usage; exit 0 ;;
    --print) only_print=1; shift ;;
    --engine | --host | --port | --gpus)
      [ $# -ge 2 ] || die "$1 needs a value"
      printf -v "${1#--}" '%s' "$2"; shift 2 ;;
    --) shift; more=("$@"); break ;;
    -*) die "unknown option $1 (--help lists them; options of the engine go after --)" ;;
    *) [ -z "$model" ] || die "one MODEL, not $model and $1"; model="$1"; shift ;;
  esac
done
[ -n "$model" ] || { usage >&2; exit 2; }
whole() { [[ "$2" =~ ^[1-9][0-9]{0,4}$ ]] || die "$1 must be a whole number from 1, not '$2'"; }
whole --port "$port"
whole --gpus "$gpus"
[ "$port" -le 65535 ] || die "--port must be at most 65535, not $port"

default_python="$root/.venv/bin/python"
[ -x "$default_python" ] || default_python=python3
python="${PYTHON:-$default_python}"
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
offers() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null; }
choose() {
  if has_gpu && offers sglang; then echo sglang; elif has_gpu && offers vllm; then echo vllm; else echo embedded; fi
}
engine="${engine:-$(choose)}"

case "$engine" in
  sglang) command=("$python" -m sglang.launch_server --model-path "$model" --host "$host" --port "$port" --tp "$gpus") ;;
  vllm)
    command=("$python" -m vllm.entrypoints.openai.api_server --model "$model" --host "$host" --port "$port")
    if has_gpu; then command+=(--tensor-parallel-size "$gpus"); else
      # Unbound threads and a fixed cache: sized from the whole memory, start-up fails beside other processes.
      command=(env VLLM_CPU_OMP_THREADS_BIND=nobind "${command[@]}" --enforce-eager --kv-cache-memory-bytes 268435456)
    fi ;;
  embedded)
    [ "$gpus" = 1 ] || die "the embedded server runs on one device: leave --gpus out"
    command=("$python" -m zerosearch.simulation.server --model "$model" --host "$host" --port "$port")
    if has_gpu; then command+=(--device cuda --dtype bfloat16); fi
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" ;;
  *) die "--engine is sglang, vllm or embedded, not '$engine'" ;;
esac
command+=(${more[@]+"${more[@]}"})

printf '[serve]' >&2
printf ' %q' "${command[@]}" >&2
printf '\n' >&2
if [ "$only_print" = 1 ]; then exit 0; fi
if [ "$engine" != embedded ]; then
  offers "$engine" || die "$python has no $engine: set PYTHON to the interpreter of the environment that has it"
fi
exec "${command[@]}"
