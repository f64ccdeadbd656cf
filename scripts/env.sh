# Functions for the Python environment that the scripts beside this file share. They source it.
#
#   hot_env_python                finds a Python >= 3.10 and sets HOT_PYTHON
#   hot_env_venv                  makes the environment if there is none
#   hot_env_install NAME ARG...   runs pip install ARG..., unless the last call with this NAME had the same arguments
#   hot_env_examples              installs what the examples need, torch among it
#   hot_env_project [EXTRA]       builds and installs this repository, unless its sources are the same; environments
#                                 with the same Python share a build
#
# HOT_PYTHON=/path/to/python and HOT_VENV=/path/to/environment override the choice (default: .venv in the
# repository's root). pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) are respected. Nothing is installed
# outside the repository, except with HOT_APT=1: then root's apt-get installs missing packages.

HOT_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
HOT_VENV="${HOT_VENV:-$HOT_ROOT/.venv}"
HOT_VENV_PYTHON="$HOT_VENV/bin/python"
export PIP_DISABLE_PIP_VERSION_CHECK=1

hot_env_say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; }
hot_env_fail() { hot_env_say "error: $*"; exit 1; }

# Beside other busy processes, OpenMP threads that wait actively made trainings twenty times slower. Call this before a
# build, whose own compilers count as load.
hot_env_busy() {
  local load cores
  load="$(cut -d ' ' -f 1 /proc/loadavg)" cores="$(nproc)"
  [[ -z "${OMP_WAIT_POLICY:-}" && "${load%.*}" -ge "$cores" ]] || return 0
  export OMP_WAIT_POLICY=passive
  hot_env_say "other processes are busy here (load average $load, $cores cores): OMP_WAIT_POLICY=passive is set"
}

hot_env_apt() {
  [[ "${HOT_APT:-}" == 1 ]] || return 1
  [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null || hot_env_fail "HOT_APT=1, but this is not root with apt-get"
  hot_env_say "installing with apt-get: $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y --no-upgrade --no-install-recommends "$@" >&2 ||
    { apt-get update >&2 && apt-get install -y --no-upgrade --no-install-recommends "$@" >&2; }
}

hot_env_is_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

hot_env_python() {
  if [[ -n "${HOT_PYTHON:-}" ]]; then
    hot_env_is_python "$HOT_PYTHON" || hot_env_fail "HOT_PYTHON=$HOT_PYTHON is no Python >= 3.10"
    return
  fi
  local name
  for name in python3 python3.15 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
    if command -v "$name" >/dev/null && hot_env_is_python "$name"; then
      HOT_PYTHON="$(command -v "$name")"
      return
    fi
  done
  hot_env_fail "no Python >= 3.10 on the PATH; install one (Debian, Ubuntu: apt-get install python3), or set HOT_PYTHON"
}

# Debian and Ubuntu name the packages of a Python after its version.
hot_env_package() { "$1" -c 'import sys; print("python%d.%d-'"$2"'" % sys.version_info[:2])'; }

# hot_env_lacking PYTHON: the packages that a build still needs. cmake and ninja come with its requirements.
hot_env_lacking() {
  if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
    echo g++
  fi
  "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    hot_env_package "$1" dev
}

# Installs packages or says how to: one message for all of them.
hot_env_need() {
  hot_env_apt "$@" ||
    hot_env_fail "missing on this machine; please run: sudo apt-get install $* (or, as root, this again with HOT_APT=1)"
}

# hot_env_deb PACKAGE: unpacks a package of the distribution below build/ and prints that folder. The system stays as
# it is, and root is not needed. Fails without apt-get or without a network.
hot_env_deb() {
  local folder="$HOT_ROOT/build/deb/$1" state="$HOT_ROOT/build/deb/apt" log
  if [[ ! -d "$folder" ]]; then
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    hot_env_say "fetching the package $1 into build/deb (nothing is installed)"
    mkdir -p "$state/lists/partial" "$state/fetched"
    log="$state/log"
    # Own lists: the system's may be empty, and only root could fill them.
    (cd "$state/fetched" && rm -f "$1"_*.deb &&
      { apt-get -o Dir::State::lists="$state/lists" -o APT::Sandbox::User=root update &&
        apt-get -o Dir::State::lists="$state/lists" -o APT::Sandbox::User=root download "$1" &&
        rm -rf "$folder.part" && dpkg-deb -x "$1"_*.deb "$folder.part" && mv "$folder.part" "$folder"; } >"$log" 2>&1) ||
      { tail -n 3 "$log" >&2; return 1; }
  fi
  printf '%s\n' "$folder"
}

hot_env_venv_works() { hot_env_is_python "$HOT_VENV_PYTHON" && "$HOT_VENV_PYTHON" -m pip --version >/dev/null 2>&1; }

hot_env_venv() {
  hot_env_venv_works && return
  hot_env_python
  hot_env_say "making the environment $HOT_VENV"
  local log lacking
  log="$(mktemp)"
  "$HOT_PYTHON" -m venv "$HOT_VENV" >"$log" 2>&1 || true
  # Debian's python3 comes without ensurepip, and maybe without pip. virtualenv does without them, and pip's own
  # wheel, of the distribution, gets it.
  hot_env_venv_works || hot_env_virtualenv >>"$log" 2>&1 || true
  lacking="$(hot_env_lacking "$HOT_PYTHON")"
  hot_env_venv_works || lacking="$(hot_env_package "$HOT_PYTHON" venv) $lacking"
  # shellcheck disable=SC2086  # a list of words
  [[ -z "$lacking" ]] || hot_env_need $lacking
  hot_env_venv_works || "$HOT_PYTHON" -m venv "$HOT_VENV" >>"$log" 2>&1 || true
  if ! hot_env_venv_works; then
    cat "$log" >&2
    hot_env_fail "cannot make a Python environment in $HOT_VENV (if that folder is an old one, remove it)"
  fi
  rm -f "$log"
}

# --target leaves the system's Python alone.
hot_env_virtualenv() {
  local folder status=0 pip=""
  if ! "$HOT_PYTHON" -m pip --version >/dev/null 2>&1; then
    folder="$(hot_env_deb python3-pip-whl)" || return
    pip="$(compgen -G "$folder/usr/share/python-wheels/pip-*.whl")" || return
  fi
  folder="$(mktemp -d)"
  PYTHONPATH="$pip" "$HOT_PYTHON" -m pip install --quiet --target "$folder" virtualenv &&
    PYTHONPATH="$folder" "$HOT_PYTHON" -m virtualenv --quiet "$HOT_VENV" || status=1
  rm -rf "$folder"
  return "$status"
}

# hot_env_once NAME FINGERPRINT COMMAND...: run the command unless it last succeeded with the same fingerprint.
hot_env_once() {
  local stamp="$HOT_VENV/.hotcore-$1" fingerprint="$2"
  shift 2
  [[ -f "$stamp" && "$(<"$stamp")" == "$fingerprint" ]] && return
  rm -f "$stamp"
  "$@" || hot_env_fail "this command failed: $*"
  printf '%s\n' "$fingerprint" >"$stamp"
}

hot_env_install() {
  local name="$1"
  shift
  # Python compiles a module when it is first imported. Compiling all of them takes as long as the installation.
  hot_env_once "install-$name" "$*" "$HOT_VENV_PYTHON" -m pip install --no-compile "$@"
}

# Packages of the examples, with the torch of both of the README's commands. 2.13 has none for Python 3.15.
HOT_TORCH=('torch==2.13.0; python_version<"3.15"' 'torch==2.15.0; python_version>="3.15"')
hot_env_examples() { hot_env_install train "${HOT_TORCH[@]}" numpy scikit-learn matplotlib tqdm; }

# One hash of the package's sources, with the Python and the build options that change it.
hot_env_sources() {
  {
    printf '%s\n' "${CMAKE_ARGS:-}" "${SKBUILD_CMAKE_ARGS:-}" "${HOT_CUDA:-}" "${HOT_JAX:-}" "${CXX:-}"
    "$HOT_VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))'
    cd "$HOT_ROOT"
    printf '%s\n' "${HOT_CUTLASS:-}" "${CUDAARCHS:-}"
    find CMakeLists.txt pyproject.toml README.md LICENSE cmake cpp cuda python third_party \
      \( -path third_party/cutlass -o -name __pycache__ \) -prune -o -type f -print0 2>/dev/null |
      LC_ALL=C sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d ' ' -f 1
}

hot_env_has_nvcc() {
  [[ -n "${CUDACXX:-}" ]] || command -v nvcc >/dev/null ||
    [[ -x "${CUDA_HOME:-}/bin/nvcc" || -x "${CUDA_PATH:-}/bin/nvcc" || -x /usr/local/cuda/bin/nvcc ]]
}

# Builds for the CPU where a GPU has no nvcc, and says so. CMake alone would stop.
hot_env_cuda() {
  if [[ -z "${HOT_CUDA:-}" && -e /dev/nvidiactl ]] && ! hot_env_has_nvcc; then
    hot_env_say "this machine has a GPU, but no CUDA compiler (nvcc): building for the CPU alone"
    export HOT_CUDA=OFF
  fi
}

# Leaves CUDA out where there is no GPU, because kernels take minutes to compile. HOT_CUDA overrides that.
hot_env_project() {
  hot_env_cuda
  if [[ -z "${HOT_CUDA:-}" && ! -e /dev/nvidiactl ]]; then local -x HOT_CUDA=OFF; fi
  local extra="${1:+[$1]}" sources
  sources="$(hot_env_sources)"
  hot_env_once project "$extra $sources" hot_env_build "$extra" "$HOT_ROOT/build/wheels/$sources"
}

# hot_env_build EXTRA FOLDER: installs the wheel in the folder; makes it where there is none yet.
hot_env_build() {
  local extra="$1" folder="$2" lacking wheel
  if ! compgen -G "$folder/*.whl" >/dev/null; then
    lacking="$(hot_env_lacking "$HOT_VENV_PYTHON")"
    # shellcheck disable=SC2086  # a list of words
    [[ -z "$lacking" ]] || hot_env_need $lacking
    hot_env_say "building hotcore"
    rm -rf "$HOT_ROOT/build/wheels" # those of older sources
    "$HOT_VENV_PYTHON" -m pip wheel --no-deps --wheel-dir "$folder.part" "$HOT_ROOT" || return
    mv "$folder.part" "$folder"
  fi
  wheel="$(compgen -G "$folder/*.whl")"
  # pip keeps an installed package of the same version, so the old one goes first.
  "$HOT_VENV_PYTHON" -m pip uninstall -qq --yes hotcore-int8 && "$HOT_VENV_PYTHON" -m pip install "$wheel$extra"
}
