#!/usr/bin/env bash
# Builds anyflash on a machine with an NVIDIA GPU, and tests and times it there. No network is used.
#
#   tests/gpu/run.sh WHEELS [RESULTS]
#
# WHEELS   a folder with the wheels that the machine's Python lacks. Make it on a machine with a network:
#            pip download -d WHEELS -r third_party/requirements.txt pytest hypothesis numpy ml_dtypes
#            pip download -d WHEELS --no-deps -r third_party/requirements-headers.txt
# RESULTS  a folder for logs and the benchmark's results (default: build/gpu/results)
#
# The machine brings Python 3.10 or later, PyTorch with CUDA, a CUDA toolkit (nvcc and
# compute-sanitizer), g++. Environment:
#   ANYFLASH_ARCHS  GPU architectures to build (default 90 and 90a)
#   STAGES          some of: build atoms tests memcheck racecheck soak fuzz, and the benchmark's presets:
#                   paper gqa varlen features decode masks large training memory overhead (default: all)
#
# Every stage runs, whatever the others do; the exit status is 0 if all passed.
set -uo pipefail

if [[ $# -lt 1 || ! -d $1 ]]; then
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
  exit 2
fi
wheels=$(realpath "$1")
cd "$(dirname "$0")/../.." || exit 2
mkdir -p "${2:-build/gpu/results}"
results=$(realpath "${2:-build/gpu/results}")
venv=$PWD/build/gpu/venv
python=$venv/bin/python
presets="paper gqa varlen features decode masks large training memory overhead"
stages=" ${STAGES:-build atoms tests memcheck racecheck soak fuzz $presets} "
failed=()

stage() { # NAME COMMAND...
  local name=$1 start=$SECONDS status
  shift
  [[ $stages == *" $name "* ]] || return 0
  echo "== $name"
  if "$@" 2>&1 | tee "$results/$name.log"; then status=passed; else status=FAILED; fi
  [[ $status == passed ]] || failed+=("$name")
  echo "== $name $status, $((SECONDS - start)) s"
}

pip_install() {
  "$python" -m pip --disable-pip-version-check install -q --no-index --find-links "$wheels" "$@"
}

# The new environment sees python3's packages, also where that is an environment itself.
build() {
  python3 -m venv --system-site-packages "$venv" &&
    python3 -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
      >"$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/parent.pth" &&
    pip_install -r third_party/requirements.txt pytest hypothesis numpy ml_dtypes &&
    pip_install --no-deps -r third_party/requirements-headers.txt &&
    PATH=$venv/bin:$PATH pip_install --no-build-isolation --no-deps --force-reinstall \
      --config-settings=build-dir=build/gpu/wheel \
      --config-settings=cmake.define.ANYFLASH_CUDA=ON \
      --config-settings=cmake.define.ANYFLASH_ARCHS="${ANYFLASH_ARCHS:-90;90a-real}" . &&
    "$python" -m anyflash
}

# The emulator's instructions against their definitions, on the hardware.
atoms() {
  local cutlass
  cutlass=$("$python" -c "import importlib.util as u
print(u.find_spec('cutlass_library').submodule_search_locations[0] + '/source/include')") &&
    nvcc -x cu -std=c++17 -arch=native --expt-relaxed-constexpr -isystem "$cutlass" \
      tests/emulator/cpp/atoms.cpp -o build/gpu/atoms &&
    build/gpu/atoms
}

# With PyTorch's tensors, and with CuPy's and JAX's where these are installed.
tests() {
  local -a folders=(kernels api torch flash_attn cli)
  if "$python" -c "import jax" 2>/dev/null; then folders+=(jax); else echo "no JAX: not tested"; fi
  ANYFLASH_TEST_BACKENDS=cuda "$python" -m pytest -rs -m cuda "${folders[@]/#/tests/python/}"
}

# Guard 0: every tensor is a device block of its exact size, so that an access past its end is seen.
sanitize() { # TOOL
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  ANYFLASH_TEST_BACKENDS=cuda ANYFLASH_TEST_GUARD=0 "$sanitizer" --tool "$1" --error-exitcode 1 \
    --kernel-regex kns=anyflash "$python" -m pytest -m "smoke and cuda" \
    tests/python/kernels
}

soak() {
  "$python" tests/soak/soak.py --device cuda --steps 20000 --seed 1
}

fuzz() {
  "$python" tests/fuzz/python_api.py --device cuda --calls 20000 --seed 1 --all
}

# PyTorch's backends, and what else is installed, in the same process. `python -m anyflash bench --load
# FILE.json --plot FILE.svg` draws the results, on any machine.
bench() { # PRESET
  local -a arguments=("$1" --json "$results/$1.json" --markdown "$results/$1.md")
  [[ $1 != paper ]] || arguments+=(--peers +deterministic)
  [[ $1 != overhead ]] || local -x OMP_NUM_THREADS=1
  "$python" -m anyflash bench "${arguments[@]}"
}

stage build build
stage atoms atoms
stage tests tests
stage memcheck sanitize memcheck
stage racecheck sanitize racecheck
stage soak soak
stage fuzz fuzz
for preset in $presets; do
  stage "$preset" bench "$preset"
done

if [[ ${#failed[@]} -gt 0 ]]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
