# Every command of this repository. Needs Python 3.11+, a C compiler and Rust; the rest is installed
# into $(VENV). `make help` lists what follows a ##.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUST   := Cargo.toml $(wildcard Cargo.lock) build.rs $(shell find src -name '*.rs') $(wildcard cuda/*)

# The environment this Makefile makes, whatever shell it is called from.
export VIRTUAL_ENV := $(abspath $(VENV))
unexport PYTHONHOME PYTHONPATH

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- the environment: two stamps, so that a second run starts at once -----------------------------

$(VENV)/.tools:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "kvcatch needs Python 3.11 or newer; $(PYTHON) is %d.%d. Say: make PYTHON=python3.13 ..." % v[:2])'
	@command -v cargo >/dev/null || { echo "kvcatch needs Rust: no cargo on the PATH"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "maturin>=1.9.4,<2"
	@touch $@

$(VENV)/.built: $(VENV)/.tools pyproject.toml $(RUST)
	$(BIN)/maturin develop --release
	@touch $@

# kvcatch is installed by now: this adds what its `test` extra names, and rebuilds nothing.
$(VENV)/.test-tools: pyproject.toml | $(VENV)/.built
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "kvcatch[test]"
	@touch $@

# --- the two commands of the README ---------------------------------------------------------------

.PHONY: bench
bench: $(VENV)/.built ## Build and run `kvcatch bench` on the built-in workload
	$(BIN)/kvcatch bench

.PHONY: test
test: $(VENV)/.built $(VENV)/.test-tools ## Build and run every test: Rust, Python, instruction counts, fuzzing
	$(BIN)/python tests/run.py $(SUITES)

# --- while working --------------------------------------------------------------------------------

.PHONY: dev
dev: $(VENV)/.built $(VENV)/.test-tools ## Build the extension (release) into .venv with what tests and lint need

.PHONY: test-rust test-python test-kernels test-kernels-all test-vllm
test-rust: $(VENV)/.built $(VENV)/.test-tools ## The Rust tests alone
	$(BIN)/python tests/run.py --only rust
test-python: $(VENV)/.built $(VENV)/.test-tools ## The Python tests alone
	$(BIN)/python tests/run.py --only python
test-kernels: $(VENV)/.built $(VENV)/.test-tools ## The CUDA kernels on the CPU: emulated, sanitizers, compile budget
	$(BIN)/python tests/run.py --only kernels
test-kernels-all: $(VENV)/.built $(VENV)/.test-tools ## The same with every variant and shape (slow)
	$(BIN)/python tests/run.py --only kernels --slow
test-vllm: $(VENV)/.built $(VENV)/.test-tools ## The plugin in a real vLLM (6 GB: makes target/vllm-env, or KVCATCH_VLLM_ENV=...)
	$(BIN)/python tests/run.py --only vllm

.PHONY: format
format: $(VENV)/.built $(VENV)/.test-tools ## Format Rust and Python
	cargo fmt
	cargo fmt --manifest-path fuzz/Cargo.toml
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

.PHONY: lint
lint: $(VENV)/.built $(VENV)/.test-tools stubtest ## Formatting, clippy with and without Python, docs, ruff, mypy, stubtest
	cargo fmt --check
	cargo fmt --check --manifest-path fuzz/Cargo.toml
	cargo clippy --all-targets -- -D warnings
	cargo clippy --all-targets --features python -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps --features serde
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: stubtest
stubtest: $(VENV)/.built $(VENV)/.test-tools ## Compare _core.pyi with the module it describes
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml kvcatch._core

FUZZ_SECONDS ?= 60
.PHONY: fuzz
fuzz: $(VENV)/.tools ## Fuzz the pool for FUZZ_SECONDS (60); needs a C++ compiler
	$(BIN)/python tests/run.py --only fuzz --fuzz-seconds $(FUZZ_SECONDS)

.PHONY: miri
miri: ## Unit tests under Miri, where a nightly toolchain has it
	@cargo +nightly miri --version >/dev/null 2>&1 || { echo "miri: not installed (rustup +nightly component add miri)"; exit 1; }
	MIRIFLAGS="-Zmiri-strict-provenance" PROPTEST_CASES=2 cargo +nightly miri test --lib

# --- measuring ------------------------------------------------------------------------------------

.PHONY: figures
figures: $(VENV)/.built $(VENV)/.test-tools ## Print the README's table, each figure beside its baseline
	$(BIN)/python benches/figures.py

.PHONY: bench-rust
bench-rust: ## Criterion benches of the core
	cargo bench

.PHONY: callgrind callgrind-update
callgrind: $(VENV)/.built $(VENV)/.test-tools ## Instructions per hot call against tests/callgrind/counts.toml
	$(BIN)/python tests/run.py --only callgrind
callgrind-update: $(VENV)/.tools ## Count them anew and rewrite the file
	$(BIN)/python tests/callgrind/harness.py --update

# --- releasing ------------------------------------------------------------------------------------

.PHONY: wheels
wheels: $(VENV)/.tools ## Wheel and source distribution into dist/
	$(BIN)/maturin build --release --sdist --out dist

.PHONY: clean
clean: ## Remove builds and the environment
	rm -rf target fuzz/target dist $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	rm -f python/kvcatch/_core*.so
	find python tests benches -name __pycache__ -prune -exec rm -rf {} +
