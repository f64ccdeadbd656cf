#!/usr/bin/env bash
# Checks formatting, lint, types and the sentences of comments, with the tools of .venv (scripts/test.sh makes it).
#
#   bash scripts/check_style.sh             every check
#   bash scripts/check_style.sh CHECK...    some of: clang-format ruff-check ruff-format mypy words shell
#   bash scripts/check_style.sh --fix       reformats instead of complaining
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$HOT_ROOT"
export PATH="$HOT_VENV/bin:$PATH"

cpp_files() {
  find cpp cuda python/bindings tests examples benchmarks -type f \
    \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0
}

# mypy takes the types of hotcore._core from the installed package. An extension in the tree comes first.
stub_of_core() {
  if ! compgen -G 'python/hotcore/_core*.so' >/dev/null; then
    "$HOT_VENV_PYTHON" -c 'import hotcore._core' || hot_env_fail "mypy needs the package: bash scripts/test.sh style"
    return
  fi
  mkdir -p build/stubs/hotcore && : >build/stubs/hotcore/__init__.pyi
  "$HOT_VENV_PYTHON" -m nanobind.stubgen -q -i python -m hotcore._core -o build/stubs/hotcore/_core.pyi
}

# Newer releases of torch than the first of HOT_TORCH annotate more, so that some of the package's ignores are unused.
run_mypy() {
  local ignores=--warn-unused-ignores torch
  torch="$("$HOT_VENV_PYTHON" -c 'import importlib.metadata as of; print(of.version("torch"))')"
  [[ "${HOT_TORCH[0]}" == "torch==${torch%+*};"* ]] || ignores=--no-warn-unused-ignores
  mypy --no-error-summary "$ignores" --python-executable "$HOT_VENV_PYTHON"
}

check() {
  case "$1" in
    clang-format) cpp_files | xargs -0 clang-format --dry-run -Werror ;;
    ruff-check) ruff check --quiet . ;;
    ruff-format) ruff format --quiet --check . || { ruff format --diff --quiet . ; false; } ;;
    mypy) stub_of_core && run_mypy ;;
    words) "$HOT_VENV_PYTHON" scripts/check_words.py ;;
    shell) for file in scripts/*.sh .ci/run; do bash -n "$file" || return; done ;;
    *) hot_env_fail "no such check: $1" ;;
  esac
}

if [[ "${1:-}" == --fix ]]; then
  cpp_files | xargs -0 clang-format -i
  ruff check --quiet --fix .
  ruff format --quiet .
  exit
fi

[[ $# -gt 0 ]] || set -- clang-format ruff-check ruff-format mypy words shell
failed=0
for name in "$@"; do
  if (check "$name"); then
    hot_env_say "$name ok"
  else
    hot_env_say "$name FAILED (bash scripts/check_style.sh --fix mends what can be mended)"
    failed=1
  fi
done
exit "$failed"
