#!/usr/bin/env bash
# Builds everything and runs all tests. Ends non-zero if anything failed. It needs Python >= 3.10 and a C++ compiler. The
# first call makes an environment (.venv).
#
#   bash scripts/test.sh [cpp] [python] [style] [docs]
#       cpp is gtest and a consumer project through ctest, docs is the site. The default is all four parts, 10 to 20
#       minutes on two idle cores, longer where CUDA is compiled.
#   bash scripts/test.sh quick [PART...]
#       Five minutes on two cores, between two edits: C++ without CUDA and without the consumer project, pytest without
#       the tests marked long, style. No wheel is tried in an empty environment.
#   bash scripts/test.sh sanitizers
#       The C++ tests under AddressSanitizer and UBSan, then under ThreadSanitizer, each with its own build.
#   bash scripts/test.sh fuzz
#       A minute of fuzzing: C++ calls, C ABI (libFuzzer, clang), and the loaders of files. HOT_FUZZ_SECONDS changes it.
#   bash scripts/test.sh --torch VERSION
#       tests/with_torch, except what no torch changes, with another torch. VERSION is a version, "oldest" (of
#       pyproject.toml) or "newest" (of torch-newest.txt).
#
# --torch makes its own environment, build/venv-torch-VERSION. It holds that torch, NumPy, pytest, hypothesis and the
# package, which is built once for all environments. Tests that need another library are skipped, and say so. A torch
# with CUDA is a download of 3 GB.
#
# The CUDA kernels are compiled for sm_80 and sm_90a where nvcc is found. The Python package gets them only where there
# is a GPU. HOT_CUDA=OFF leaves them out, HOT_CUDA=ON requires them. They take most of a first call's time. Where ccache
# is installed, it keeps them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

parts=()
version=""
quick=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    quick) quick=1 ;;
    --torch)
      [[ -n "${2:-}" ]] || hot_env_fail "--torch: a version is missing, for example 2.9.1, oldest or newest"
      version="$2"
      shift
      ;;
    cpp | python | style | docs | sanitizers | fuzz) parts+=("$1") ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '/^set /d'; exit 0 ;;
    *) hot_env_fail "unknown option: $1 (see --help)" ;;
  esac
  shift
done
if [[ -n "$version" ]]; then
  [[ ${#parts[@]} -eq 0 ]] || hot_env_fail "--torch runs tests/with_torch alone; without: ${parts[*]}"
  parts=(torch)
  case "$version" in
    oldest) version="$(sed -n 's/^torch = \["torch>=\([0-9.]*\)"\]$/\1/p' "$HOT_ROOT/pyproject.toml")" ;;
    newest) version="$(sed -n 's/^torch==//p' "$HOT_ROOT/scripts/torch-newest.txt")" ;;
  esac
  [[ "$version" =~ ^[0-9]+\.[0-9]+(\.[0-9]+)?$ ]] ||
    hot_env_fail "--torch: '$version' is no version; expected for example 2.9.1, oldest or newest"
  HOT_VENV="$HOT_ROOT/build/venv-torch-$version"
  HOT_VENV_PYTHON="$HOT_VENV/bin/python"
fi
if [[ -n "$quick" ]]; then
  export HOT_CUDA=OFF
  [[ ${#parts[@]} -gt 0 ]] || parts=(cpp python style)
fi
[[ ${#parts[@]} -gt 0 ]] || parts=(cpp python style docs)
wanted() { [[ " ${parts[*]} " == *" $1 "* ]]; }

jobs="$(nproc)"
build="$HOT_ROOT/build/${quick:+quick-}test"
results="$build/results${version:+-torch-$version}"
mkdir -p "$build"
rm -rf "$results"
mkdir -p "$results"

# ---- the environment ----

hot_env_busy
hot_env_say "the environment, then: ${parts[*]}${quick:+; about five minutes on two idle cores}"
[[ -n "$quick" || ${#parts[@]} -lt 4 ]] || hot_env_say "10 to 20 minutes on two idle cores; the first call takes longer"
hot_env_venv
has_gtest() {
  [[ -n "${GTest_DIR:-}${GTest_ROOT:-}" ]] ||
    printf '#include <gtest/gtest.h>\n' | "${CXX:-c++}" -std=c++17 -E -x c++ - >/dev/null 2>&1
}
lacking="$(hot_env_lacking "$HOT_VENV_PYTHON")"
if { wanted cpp || wanted sanitizers; } && ! has_gtest; then
  if [[ "${HOT_APT:-}" != 1 ]] && folder="$(hot_env_deb libgtest-dev)" && [[ -d "$folder/usr" ]]; then
    export GTest_ROOT="$folder/usr"
  else
    lacking+=" libgtest-dev"
  fi
fi
# shellcheck disable=SC2086  # a list of words
[[ -z "$lacking" ]] || hot_env_need $lacking

export PATH="$HOT_VENV/bin:$PATH"
# With ccache the C++ tests, the wheels and other checkouts of the same sources share objects, so their flags are equal.
export CCACHE_BASEDIR="${CCACHE_BASEDIR:-$HOT_ROOT}" CCACHE_NOHASHDIR=1 SKBUILD_CMAKE_DEFINE="HOT_WERROR=ON"
archs="80-real;90a-real"
# Inductor's cache belongs to this checkout and this torch: other processes of the machine write to the default one.
export TORCHINDUCTOR_CACHE_DIR="$HOT_ROOT/build/inductor${version:+-torch-$version}"
if [[ -n "$version" ]]; then
  (hot_env_install torch "torch==$version" numpy hypothesis 'pytest>=8' pytest-xdist) ||
    hot_env_fail "torch==$version: pip has none for $("$HOT_VENV_PYTHON" --version) on this machine, or could not" \
      "fetch it (its message is above). hotcore takes torch >= 2.6; HOT_PYTHON=/path/to/python chooses another Python"
else
  hot_env_install test 'cmake>=3.24' ninja hypothesis 'pytest>=8' pytest-xdist -r "$HOT_ROOT/scripts/style-requirements.txt"
  hot_env_examples
  # Libraries with models that tests build without downloads. torch is named again, so that pip keeps its version.
  (hot_env_install models "${HOT_TORCH[@]}" timm==1.0.31 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 \
    lightning==2.6.6 bitsandbytes==0.50.2 torchao==0.18.0 pydantic) ||
    hot_env_say "no timm, transformers, peft, accelerate, lightning, bitsandbytes, torchao: what needs them is skipped"
  # hotcore.jax: JAX, and the headers that its part of the package is built from.
  jax=('jax==0.10.2; python_version<"3.15"' 'jax==0.12.0; python_version>="3.15"')
  (hot_env_install jax "${jax[@]}" && "$HOT_VENV_PYTHON" "$HOT_ROOT/scripts/fetch_xla_ffi.py" >&2) ||
    hot_env_say "no JAX: the tests of hotcore.jax are skipped"
  (hot_env_install flax "${jax[@]}" flax==0.12.8) || hot_env_say "no flax: the tests of hotcore.jax.flax are skipped"
fi

# ---- the parts; each goes on to the end, whatever the others did ----

# passed NAME and broken NAME add a test to the summary. They serve checks without a report, and suites that stopped
# before they wrote one.
passed() { printf '%s\n' "$1" >>"$results/passed"; }
broken() {
  hot_env_say "FAILED: $1"
  printf '%s\n' "$1" >>"$results/broken"
}

test_cpp() {
  hot_env_say "building the library and the C++ tests in ${build#"$HOT_ROOT"/}"
  hot_env_cuda
  local -x CXX="${CXX:-$(command -v g++ || command -v c++)}" # as scikit-build-core chooses it
  cmake -S "$HOT_ROOT" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DHOT_BUILD_TESTS=ON -DHOT_WERROR=ON \
    -DHOT_CUDA="${HOT_CUDA:-AUTO}" -DHOT_CUTLASS=ON "-DCMAKE_CUDA_ARCHITECTURES=$archs" >"$results/cmake.log" 2>&1 ||
    { cat "$results/cmake.log"; broken "cmake"; return; }
  grep '^-- hotcore' "$results/cmake.log" || true
  cmake --build "$build" -j "$jobs" || { broken "C++ build"; return; }
  ctest --test-dir "$build" ${quick:+-LE consumer} -j "$jobs" --no-tests=error --output-on-failure \
    --output-junit "$results/ctest.xml" ||
    [[ -f "$results/ctest.xml" ]] || broken "ctest"
}

# A race, a leak or undefined behaviour ends a test: the preset has -fno-sanitize-recover. The preset leaves out GCC's
# warning of uninitialised values, which is wrong for std::optional under AddressSanitizer.
test_sanitizers() {
  local preset
  for preset in asan tsan; do
    hot_env_say "building the C++ tests in build/$preset"
    # libhot keeps its -O3. The tests, which are most of the compilation, are compiled with -O1.
    (cd "$HOT_ROOT" && cmake --preset "$preset" -DHOT_WERROR=ON -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" \
      >"$results/$preset.log" 2>&1) ||
      { cat "$results/$preset.log"; broken "$preset: cmake"; continue; }
    cmake --build "$HOT_ROOT/build/$preset" -j "$jobs" || { broken "$preset: build"; continue; }
    ctest --test-dir "$HOT_ROOT/build/$preset" -LE consumer -j "$jobs" --no-tests=error --output-on-failure \
      --output-junit "$results/$preset.xml" || [[ -f "$results/$preset.xml" ]] || broken "$preset: ctest"
  done
}

# Each target runs for a third of HOT_FUZZ_SECONDS (default 60). Failing inputs are kept in build/fuzz/found.
test_fuzz() {
  local target each=$((${HOT_FUZZ_SECONDS:-60} / 3)) build_fuzz="$HOT_ROOT/build/fuzz"
  local compiler="${HOT_CLANG:-clang++-14}"
  command -v "$compiler" >/dev/null ||
    { broken "fuzz: no $compiler (apt-get install clang-14 libclang-rt-14-dev, or HOT_CLANG)"; return; }
  hot_env_say "building the fuzz targets in build/fuzz"
  (cd "$HOT_ROOT" && cmake --preset fuzz -DCMAKE_CXX_COMPILER="$compiler" -DHOT_WERROR=ON >"$results/fuzz.log" 2>&1) ||
    { cat "$results/fuzz.log"; broken "fuzz: cmake"; return; }
  cmake --build "$build_fuzz" -j "$jobs" || { broken "fuzz: build"; return; }
  mkdir -p "$build_fuzz/found"
  for target in fuzz_cpp fuzz_c; do
    mkdir -p "$build_fuzz/corpus/$target"
    if ASAN_OPTIONS=malloc_context_size=1 UBSAN_OPTIONS=print_stacktrace=1 \
      "$build_fuzz/tests/fuzz/$target" -max_total_time="$each" -max_len=160 -len_control=0 -verbosity=0 \
      -print_final_stats=1 -artifact_prefix="$build_fuzz/found/" "$build_fuzz/corpus/$target" \
      "$HOT_ROOT/tests/fuzz/found" \
      >"$results/$target.log" 2>&1; then
      passed "fuzz: $target"
      grep 'number_of_executed_units' "$results/$target.log"
    else
      cat "$results/$target.log"
      broken "fuzz: $target"
    fi
  done
  if (hot_env_project torch) && "$HOT_VENV_PYTHON" "$HOT_ROOT/tests/fuzz/fuzz_loaders.py" --seconds "$each"; then
    passed "fuzz: loaders"
  else
    broken "fuzz: loaders"
  fi
}

test_python() {
  hot_env_say "installing the package"
  (hot_env_project torch) || { broken "pip install"; return; }
  [[ -n "$version$quick" ]] || test_wheel
  # One process per core, each with one torch thread, and each file in one process. Tests of threads set their own
  # number. With a GPU one process runs everything, because tests measure its memory.
  local workers=()
  if [[ ! -e /dev/nvidiactl ]]; then
    workers=(-n "$((jobs < 8 ? jobs : 8))" --dist loadfile)
    local -x OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  fi
  (cd "$HOT_ROOT" && "$HOT_VENV_PYTHON" -m pytest "$@" ${workers[@]+"${workers[@]}"} -m "${quick:+not long}" --durations=20 \
    --junit-xml "$results/pytest.xml") ||
    [[ -f "$results/pytest.xml" ]] || broken "pytest"
}

# Leaves out what no version of torch changes: a benchmark, and half a minute each of failing allocations and of leaks.
test_torch() {
  test_python tests/with_torch --ignore-glob '*/test_gpt.py' \
    --deselect tests/with_torch/test_faults.py::test_memory_that_really_runs_out \
    --deselect tests/with_torch/test_faults.py::test_steps_without_growth
}

test_wheel() {
  local wheel folder="$HOT_ROOT/build/wheels-cuda"
  if wheel="$(compgen -G "$HOT_ROOT/build/wheels/*/*.whl")"; then
    try_wheel "wheel" "$wheel"
    hot_env_say "a release's dry run with this wheel: source distribution, checks, SBOM, sums"
    rm -rf "$HOT_ROOT/build/release"
    if "$HOT_VENV_PYTHON" "$HOT_ROOT/scripts/release.py" --system-compiler --wheels "${wheel%/*}" \
      --out "$HOT_ROOT/build/release" >"$results/release.log" 2>&1; then
      passed "release, dry run"
    else
      tail -30 "$results/release.log"
      broken "release, dry run"
    fi
  else
    hot_env_say "no wheel in build/wheels (it is installed already): not tried in an empty environment"
  fi
  [[ "${HOT_CUDA:-}" != OFF ]] || { hot_env_say "HOT_CUDA=OFF: no wheel with CUDA is tried"; return 0; }
  hot_env_has_nvcc || { hot_env_say "no CUDA compiler: no wheel with CUDA is tried"; return 0; }
  # Without a GPU this shows that such a wheel builds, is complete, and runs on the CPU. It takes test_cpp's kernels,
  # without CUTLASS's: a release's wheel takes half an hour.
  hot_env_say "building a wheel with CUDA for $archs"
  rm -rf "$folder"
  if HOT_CUDA=ON HOT_CUTLASS=OFF CUDAARCHS="$archs" \
    "$HOT_VENV_PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$HOT_ROOT"; then
    try_wheel "wheel with CUDA" --flavour CUDA "$folder"/*.whl
  else
    broken "the wheel with CUDA"
  fi
}

# try_wheel WHAT [OPTION...] WHEEL
try_wheel() {
  local what="$1"
  shift
  hot_env_say "installing the $what into an empty environment"
  if "$HOT_VENV_PYTHON" "$HOT_ROOT/scripts/check_wheel.py" --any-platform --try "$@"; then
    passed "$what"
  else
    broken "the $what in an empty environment"
  fi
}

test_style() {
  local check
  (hot_env_project torch) || broken "pip install"  # mypy reads the types of its extension
  for check in clang-format ruff-check ruff-format mypy words shell; do
    if bash "$HOT_ROOT/scripts/check_style.sh" "$check"; then
      passed "style: $check"
    else
      broken "style: $check"
    fi
  done
}

test_docs() {
  hot_env_say "building the site of the docs in build/site"
  if bash "$HOT_ROOT/scripts/docs.sh"; then
    passed "docs: site"
  else
    broken "docs: site"
  fi
}

number=0
for part in "${parts[@]}"; do
  since=$SECONDS last="$build/seconds-$part"
  [[ ! -f "$last" ]] || took=" (last time $(<"$last") s)"
  hot_env_say "$((++number)) of ${#parts[@]}: $part${took:-}"
  "test_$part"
  hot_env_say "$number of ${#parts[@]}: $part took $((SECONDS - since)) s"
  printf '%s\n' $((SECONDS - since)) >"$last"
  took=""
done

# ---- the summary ----

"$HOT_VENV_PYTHON" - "$results" "${version:+torch $version: }" <<'PYTHON'
import sys
import xml.etree.ElementTree as tree
from pathlib import Path

results = Path(sys.argv[1])


def lines(name):
    path = results / name
    return path.read_text().splitlines() if path.exists() else []


passed = failed = skipped = 0
names = []
for report in sorted(results.glob("*.xml")):
    for case in tree.parse(report).getroot().iter("testcase"):
        status = case.get("status")  # ctest's; pytest has child elements only
        if case.find("failure") is not None or case.find("error") is not None or status == "fail":
            failed += 1
            names.append(f"{case.get('classname')} {case.get('name')}")
        elif case.find("skipped") is not None or status in ("notrun", "disabled"):
            skipped += 1
        else:
            passed += 1
passed += len(lines("passed"))
failed += len(lines("broken"))
for name in names + lines("broken"):
    print("FAILED", name)
print(f"{sys.argv[2]}{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(failed > 0 or passed == 0)
PYTHON
