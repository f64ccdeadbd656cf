#!/usr/bin/env bash
# Trains a small ViT and a small GPT in fp32 and with HOT, and compares them: one table, out/train.png, out/train.json.
# That takes about 75 seconds on two idle cores. It needs Python >= 3.10 and a C++ compiler. The first call makes an
# environment (.venv) and builds hotcore into it, which takes some minutes more.
#
#   bash scripts/train.sh [--task vit|gpt] [--recipe NAME,...] [--forward plain,int8] [--device cpu|cuda] [--steps N] [--seed N] [--out FOLDER]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

hot_env_python
# Reports a wrong option before the build.
"$HOT_PYTHON" "$HOT_ROOT/examples/train.py" --check-options "$@"
for option in "$@"; do
  [[ "$option" != -h && "$option" != --help ]] || exit 0
done

hot_env_busy
hot_env_venv_works || hot_env_say "first call: downloads torch and builds hotcore, a few minutes; then the training"
hot_env_venv
hot_env_examples
hot_env_project torch
exec "$HOT_VENV_PYTHON" "$HOT_ROOT/examples/train.py" "$@"
