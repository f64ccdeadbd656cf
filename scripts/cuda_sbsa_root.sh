#!/usr/bin/env bash
# Makes a CUDA toolkit that compiles for aarch64 servers on this machine (scripts/release.py --cuda --aarch64). It has
# this machine's nvcc with the CUDA runtime of PyPI's wheel for aarch64. Nothing is installed.
#
#   bash scripts/cuda_sbsa_root.sh FOLDER      prints FOLDER; CUDACXX=FOLDER/bin/nvcc CUDAFLAGS="-target-dir sbsa-linux"
#
# The host compiler is a cross compiler (CUDAHOSTCXX; scripts/old_glibc.sh FOLDER aarch64).
set -euo pipefail
[[ $# -eq 1 && "$1" != -* ]] || { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '/^set /d'; exit 2; }
mkdir -p "$1"
folder="$(cd "$1" && pwd)"

if [[ ! -e "$folder/targets/sbsa-linux/lib/libcudart_static.a" ]]; then
  top="$(realpath "$(nvcc --dryrun -c any.cu 2>&1 | sed -n 's/^#\$ TOP=//p')")"
  release="$(nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')"
  name=nvidia-cuda-runtime
  [[ "${release%%.*}" != 12 ]] || name=nvidia-cuda-runtime-cu12
  python3 -m pip download --quiet --no-deps --only-binary=:all: --platform manylinux2014_aarch64 --dest "$folder/wheel" \
    "$name==$release.*" >&2
  python3 -m zipfile -e "$folder"/wheel/*.whl "$folder/pypi"
  target="$folder/targets/sbsa-linux"
  mkdir -p "$target"
  cp -r "$top/bin" "$folder"
  ln -sfn "$top/nvvm" "$folder/nvvm"
  cp -rL "$top/include" "$target"  # of the compilers and CCCL, too; the same for every processor
  cp -r "$(dirname "$(find "$folder/pypi" -name libcudart_static.a)")" "$target/lib"
  ln -sf "$(basename "$target"/lib/libcudart.so.*)" "$target/lib/libcudart.so"  # CMake asks for it
  rm -rf "$folder/pypi" "$folder/wheel"
fi
printf '%s\n' "$folder"
