#!/usr/bin/env bash
# Makes a toolkit of CUDA 12 for wheels that run on drivers from 525 on (scripts/release.py --cuda). It has Debian's
# nvcc 12.4 with PyPI's ptxas 12.8 and CUDA C++ headers. The older ptxas would serialise the wgmma of the kernel for
# rows of tokens. Nothing is installed.
#
#   PATH="$(bash scripts/cuda12_root.sh FOLDER)/bin:$PATH" CUDAARCHS="80-real;90a-real;80-virtual" \
#     python scripts/release.py --cuda
#
# nvcc 12.4 knows no sm_100 and no sm_120: such GPUs run sm_80's PTX. It downloads 1 GB and keeps 0.2 GB.
set -euo pipefail
[[ $# -eq 1 && "$1" != -* ]] || { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '/^set /d'; exit 2; }
mkdir -p "$1"
folder="$(cd "$1" && pwd)"

if [[ ! -x "$folder/bin/nvcc" ]]; then
  HOT_DEBIAN_SECTIONS="main contrib non-free" bash "$(dirname "${BASH_SOURCE[0]}")/debian_root.sh" "$folder/debian" sid amd64 \
    nvidia-cuda-toolkit nvidia-cuda-dev libcudart12
  python3 -m pip download --quiet --no-deps --dest "$folder/wheels" nvidia-cuda-nvcc-cu12==12.8.93 \
    nvidia-cuda-cccl-cu12==12.8.90 >&2
  for wheel in "$folder"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$folder/pypi"; done
  debian="$folder/debian/usr" part="$folder/part"
  rm -rf "$part"
  mkdir -p "$part/bin" "$part/nvvm/bin" "$part/lib64"
  cp "$debian"/bin/{bin2c,cudafe++,cuobjdump,fatbinary,nvlink} "$debian/lib/nvidia-cuda-toolkit/bin/nvcc" "$part/bin"
  cp -r "$debian/lib/nvidia-cuda-toolkit/bin/crt" "$part/bin"
  cp "$debian/lib/nvidia-cuda-toolkit/bin/cicc" "$part/nvvm/bin"
  cp -r "$debian/lib/nvidia-cuda-toolkit/libdevice" "$part/nvvm"
  cp -r "$debian/include" "$part"
  cp -r "$folder"/pypi/nvidia/cuda_cccl/include/* "$part/include"
  cp -P "$debian"/lib/x86_64-linux-gnu/{libcudart,libcudadevrt}* "$part/lib64"
  install -m 755 "$folder/pypi/nvidia/cuda_nvcc/bin/ptxas" "$part/bin"
  cat >"$part/bin/nvcc.profile" <<'PROFILE'
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
PROFILE
  rm -rf "$folder/debian" "$folder/pypi" "$folder/wheels"
  mv "$part"/* "$folder"
  rmdir "$part"
fi
"$folder/bin/nvcc" --version >&2
"$folder/bin/ptxas" --version >&2
printf '%s\n' "$folder"
