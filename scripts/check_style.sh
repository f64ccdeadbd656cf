#!/usr/bin/env bash
# Formatting, lint and types, with the tools of .venv (scripts/test.sh makes it).
#
#   bash scripts/check_style.sh             every check
#   bash scripts/check_style.sh CHECK...    some of: clang-format ruff-check ruff-format mypy shell
#   bash scripts/check_style.sh --fix       reformats instead of complaining
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$HOT_ROOT"
export PATH="$HOT_VENV/bin:$PATH"

cpp_files() {
  find cpp cuda python/bindings tests examples benchmarks -type f \
    \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0
}

check() {
  case "$1" in
    clang-format) cpp_files | xargs -0 clang-format --dry-run -Werror ;;
    ruff-check) ruff check --quiet . ;;
    ruff-format) ruff format --quiet --check . || { ruff format --diff --quiet . ; false; } ;;
    mypy) mypy --no-error-summary --python-executable "$HOT_VENV_PYTHON" ;;
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

[[ $# -gt 0 ]] || set -- clang-format ruff-check ruff-format mypy shell
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
