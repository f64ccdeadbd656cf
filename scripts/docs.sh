#!/usr/bin/env bash
# Builds the documentation, with the API reference from the docstrings, into build/site (open build/site/index.html).
# Warnings are errors: a broken link, an unknown anchor or a docstring that cannot be read. If there is a browser, it
# measures that no page is wider than its window (check_pages.py). The first call makes an environment (.venv) and
# builds hotcore into it, which the API reference imports.
#
#   bash scripts/docs.sh [--linkcheck]    --linkcheck: fetch external links, too (needs a network; not part of CI)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

builder=html
case "${1:-}" in
  "") ;;
  --linkcheck) builder=linkcheck ;;
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '/^set /d'; exit 0 ;;
  *) hot_env_fail "unknown option: $1 (see --help)" ;;
esac

hot_env_venv
hot_env_examples
hot_env_install docs -r "$HOT_ROOT/scripts/docs-requirements.txt"
hot_env_project torch

# Every call begins anew (-E, an empty folder): what is gone leaves nothing, and pages are also made of headers and code.
site="$HOT_ROOT/build/site"
rm -rf "$site"
cd "$HOT_ROOT"
"$HOT_VENV_PYTHON" -m sphinx -b "$builder" -E -W --keep-going -q -d "$HOT_ROOT/build/site-cache" \
  -c docs . "$site" || hot_env_fail "the documentation has warnings (above)"
[[ "$builder" != html ]] || "$HOT_VENV_PYTHON" "$HOT_ROOT/scripts/check_pages.py" "$site" ||
  hot_env_fail "a page is wider than its window, or was not measured (above)"
hot_env_say "written: $site/index.html"
