# make demo       install into .venv and run a real transformer through anyflash; CUDA kernels are
#                 built where there is a GPU for them
# make test       install, build the C++ tests and the emulated GPU, run all tests
# make test-full  the same with every case of every table
# make check-embed   programs in C, C++ and Rust, and ONNX Runtime, with the installed library
# make check-more TensorFlow and Paddle, which are large
# make check-wheel   build a release's wheel, repair it, test it in empty environments
# make docs       the site, in build/docs
# make performance   the performance pages' tables and plot, from their data
# make lint       formatters, type checker, include rules
# Needs g++ (or clang++), Python 3.10+ with venv, and for check-embed rustc and pkg-config. The tests
# build CUDA kernels where nvcc is found. Stages and what they may take: CONTRIBUTING.md.

PYTHON ?= python3
KERNELS := ci
CUDA := AUTO
ISOLATION := --no-build-isolation
BIN := $(CURDIR)/.venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
export PATH := $(BIN):$(PATH)
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# A stage's last line; `make test` then says how long each took.
DONE = @mkdir -p build && echo "$@ $$(date +%s)" >> build/stages

.PHONY: demo test test-full begin environment install build-test lint check-cpp check-python \
  check-oldest check-oldest-torch check-pythons check-more check-emulator check-sass check-nvrtc check-embed docs \
  performance check-docs check-fuzz check-soak check-threads wheel check-wheel clean

# Without a GPU, CUDA kernels would be most of the build's time. Without nvcc, an isolated build
# brings one.
demo: GPU = $(filter 8.% 9.% 10.% 11.% 12.%, \
  $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null))
demo: CUDA = $(if $(GPU),AUTO,OFF)
demo: ISOLATION = $(if $(GPU),$(if $(shell command -v nvcc),--no-build-isolation),--no-build-isolation)
demo: .venv/demo install
	@echo
	@$(BIN)/python -m anyflash demo
	@echo
	@echo "What to try next:"
	@echo "  .venv/bin/python -m anyflash demo 'Bees make honey.' 'Trams run on rails.' --query insects"
	@echo "  .venv/bin/python -m anyflash          what is built, and what this machine can run"
	@echo "  .venv/bin/python                      the first lines of README.md, with your own arrays"
	@echo "  .venv/bin/python -m pip install torch jax    anyflash then takes their tensors, too"
	@echo "  make test                             the tests, 40 minutes and more on two cores"

test: begin environment install build-test lint check-cpp check-sass check-nvrtc check-emulator \
  check-python check-oldest check-pythons check-embed check-fuzz check-threads check-soak check-docs
	@awk 'NR == 1 {first = $$2} NR > 1 {printf "%-16s%6d s\n", $$1, $$2 - last} {last = $$2} \
	  END {printf "%-16s%6d s\n", "all", last - first}' build/stages

# Stages follow one another, so that their times mean something.
.NOTPARALLEL:
begin:
	@rm -f build/stages
	$(DONE)

environment: .venv/test .venv/headers .venv/nvrtc .venv/oldest .venv/embed .venv/docs
	$(DONE)

test-full: export ANYFLASH_TEST_FULL := 1
test-full: KERNELS := full
test-full: test check-oldest-torch

# -- environment: a marker file a step, made anew when its list of packages changes
.venv/build: third_party/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install -r third_party/requirements.txt
	touch $@

# A folder of its own, where pip does not miss what these packages require (dependencies.cmake).
.venv/headers: third_party/requirements-headers.txt .venv/build
	$(PIP) install --no-deps --upgrade --target $@ -r $<
	touch $@

# Beside the other packages: some bring libraries of the same names.
.venv/nvrtc: tests/requirements/nvrtc.txt .venv/build
	$(PIP) install --no-deps --upgrade --target $@ -r $<
	touch $@

.venv/demo: .venv/build tests/requirements/demo.txt
	$(PIP) install numpy tokenizers safetensors
	$(PIP) install --no-deps -r tests/requirements/demo.txt
	touch $@

.venv/test: .venv/demo tests/requirements/test.txt tests/requirements/sass.txt
	$(PIP) install -r tests/requirements/test.txt -r tests/requirements/sass.txt
	touch $@

.venv/oldest: .venv/test tests/requirements/oldest.txt
	test -x $@/bin/python || $(PYTHON) -m venv $@
	$@/bin/python -m pip --disable-pip-version-check -q install -r tests/requirements/oldest.txt
	touch $@

.venv/oldest-torch: .venv/test tests/requirements/oldest-torch.txt
	test -x $@/bin/python || $(PYTHON) -m venv $@
	$@/bin/python -m pip --disable-pip-version-check -q install --no-cache-dir \
	  -r tests/requirements/oldest-torch.txt
	touch $@

.venv/embed: .venv/test tests/requirements/embed.txt
	$(PIP) install -r tests/requirements/embed.txt
	touch $@

.venv/docs: .venv/test tests/requirements/docs.txt
	$(PIP) install -r tests/requirements/docs.txt
	touch $@

.venv/more: .venv/test tests/requirements/more.txt
	$(PIP) install --no-deps -r tests/requirements/more.txt
	touch $@

# -- build (pip before 23.1, as Debian 12 has it, does not know the short form -C)
install: .venv/build .venv/headers
	@mkdir -p build
	@echo "building anyflash; everything that is said meanwhile is in build/install.log"
	@$(PIP) install -vv $(ISOLATION) --config-settings=build-dir=build/wheel \
	  --config-settings=cmake.define.ANYFLASH_KERNEL_SET=$(KERNELS) \
	  --config-settings=cmake.define.ANYFLASH_CUDA=$(CUDA) . 2>&1 \
	  | tee build/install.log | sed -unE 's#^ *(\[[0-9]+/[0-9]+\]) .*[/ ](.+)$$#\1 \2#p' \
	  || { tail -n 60 build/install.log; exit 1; }
	$(DONE)

build-test: .venv/test .venv/headers
	cmake -S . -B build/test -G Ninja -DANYFLASH_CUDA=OFF -DANYFLASH_TESTS=ON -DANYFLASH_STATIC=ON \
	  -DANYFLASH_EMULATED_KERNELS=$(KERNELS) \
	  -DPython_EXECUTABLE=$(BIN)/python --log-level=WARNING
	cmake --build build/test
	$(DONE)

# -- checks
lint: .venv/test
	$(BIN)/python tests/lint/lint.py
	$(DONE)

check-cpp: build-test
	ctest --test-dir build/test --output-on-failure -j 2
	$(DONE)

check-sass: install .venv/test
	$(BIN)/python -m pytest tests/sass
	$(DONE)

check-nvrtc: .venv/test .venv/headers .venv/nvrtc
	$(BIN)/python -m pytest tests/nvrtc
	$(DONE)

check-emulator: build-test
	$(BIN)/python -m pytest tests/emulator
	$(DONE)

check-python: install build-test
	$(BIN)/python -m pytest -n auto --dist worksteal tests/python tests/lint
	$(DONE)

# The same wheel with the oldest JAX and the oldest PyTorch: the package alone is seen there.
build/oldest/anyflash: install
	mkdir -p build/oldest
	ln -sfn "$$($(BIN)/python -c 'import anyflash; print(anyflash.__path__[0])')" $@

check-oldest: build/oldest/anyflash .venv/oldest
	PYTHONPATH=build/oldest .venv/oldest/bin/python -m pytest -n auto --dist worksteal tests/python/jax
	$(DONE)

# Not in `test`, for its download of 3 GB.
OLDEST_TORCH = $(patsubst %,tests/python/torch/test_%.py,attention autograd compile errors func \
  aten direct sdpa sdpa_routing)
check-oldest-torch: build/oldest/anyflash .venv/oldest-torch
	PYTHONPATH=build/oldest .venv/oldest-torch/bin/python -m pytest -n auto --dist worksteal \
	  $(OLDEST_TORCH)
	$(DONE)

# One wheel in each CPython that is here, with the oldest NumPy and the newest.
check-pythons: install
	$(BIN)/python tests/wheel/pythons.py
	$(DONE)

# The library of build/test, installed, and the package's.
check-embed: install build-test .venv/embed
	rm -rf build/embed
	cmake --install build/test --prefix build/embed > build/embed.log
	ANYFLASH_PREFIX=$(CURDIR)/build/embed $(BIN)/python -m pytest tests/embed
	$(DONE)

# The kept inputs and a few thousand changed ones, always the same (tests/fuzz). A build of its own:
# the library under sanitizers.
check-fuzz: .venv/test .venv/headers
	cmake --preset fuzz -DCMAKE_CXX_COMPILER=g++ -DPython_EXECUTABLE=$(BIN)/python \
	  --log-level=WARNING
	cmake --build --preset fuzz
	build/fuzz/tests/fuzz/fuzz_c_abi -runs=5000 -seed=1 tests/fuzz/corpus/c_abi
	build/fuzz/tests/fuzz/fuzz_safetensors -runs=20000 -seed=1 tests/fuzz/corpus/safetensors
	$(DONE)

# The CPU library under Thread Sanitizer: threads that call at once.
check-threads: .venv/test .venv/headers
	cmake --preset tsan -DCMAKE_CXX_COMPILER=g++ -DPython_EXECUTABLE=$(BIN)/python \
	  --log-level=WARNING
	cmake --build --preset tsan
	ctest --preset tsan
	$(DONE)

check-soak: install .venv/test
	$(BIN)/python -m pytest tests/soak
	$(DONE)

check-more: install .venv/more
	$(BIN)/python -m pytest tests/python/api -k "tensorflow or paddle"

# What the release workflow does, but for the container and its older C library.
wheel: .venv/build .venv/headers
	rm -rf build/raw build/dist
	$(PIP) install -r tests/requirements/wheel.txt
	$(PIP) wheel --no-build-isolation --no-deps --config-settings=build-dir=build/release \
	  --config-settings=cmake.define.ANYFLASH_ARCHS=release -w build/raw .
	$(BIN)/auditwheel repair -w build/dist build/raw/*.whl

check-wheel: wheel
	$(BIN)/python -m pytest tests/wheel --wheel build/dist/*.whl

# -- documents
docs: install .venv/docs
	$(BIN)/python -m sphinx -W --keep-going -E -q -d build/docs-cache python/docs build/docs
	@echo "build/docs/index.html"

performance: install .venv/test
	$(BIN)/python python/docs/tools/performance.py

check-docs: install .venv/docs
	$(BIN)/python -m pytest -n auto --dist worksteal tests/docs
	$(DONE)

clean:
	rm -rf build .venv
