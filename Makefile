# `make` alone prints what there is. The environment in .venv is made on first use.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
KERNELS := $(wildcard kernels/csrc/*)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input

export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo docs docs-serve check test test-integrations test-serve test-vllm test-long lint types format
.PHONY: bench-overhead bench-eta bench-savings bench-scale bench-drain bench-per-group bench-ledger bench-report bench-serve
.PHONY: bench-bad-candidates bench-collapse bench-nights bench-slow-falls bench-depth bench-engine bench-kernels bench-memory bench-gpu bench-vllm bench-vllm-nights bench-exactness bench-acceptance bench-trees bench-grammars clean distclean wheel

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.engine ## a small job from start to end on this machine, no server needed
	@$(BIN)/specbatch demo

check: $(VENV)/.dev ## ruff, mypy and the unit tests, in minutes; ARGS="-k fencing" goes to pytest
	@tools/setup/run-checks --tier unit $(ARGS)

test: $(VENV)/.dev ## check, and the pipeline on real Redis, PostgreSQL and S3, crashes, equal bits
	@tools/setup/ensure-servers
	@tools/setup/run-checks --tier unit,pipeline $(ARGS)

test-integrations: $(VENV)/.dev ## Airflow, Dagster, Prefect, a browser, the docs' commands, Alertmanager, RabbitMQ, TLS
	@tools/setup/ensure-servers integrations
	@PYTHON=$(BIN)/python tools/setup/dag-venvs
	@tools/setup/run-tests --tier integration $(ARGS)

test-serve: $(VENV)/.dev ## `specbatch serve`, asked by OpenAI's own client, and killed
	@tools/setup/run-tests --tier unit,pipeline,integration tests/serve $(ARGS)

IN_VLLM = PYTHONPATH=tests $(VENV)-vllm/bin/python -m pytest -q -p no:cacheprovider -c /dev/null --rootdir tests/vllm_engine --confcutdir tests/vllm_engine/inside tests/vllm_engine/inside
test-vllm: $(VENV)/.dev ## the vLLM engine on vLLM's build for processors, in an environment of its own of 3.5 GB
	@PYTHON=$(BIN)/python tools/setup/vllm-venv
	@$(IN_VLLM)/in_vllm.py $(ARGS)

test-long: $(VENV)/.dev ## full grids and a thousand disturbed runs; hours
	@tools/setup/ensure-servers integrations
	@tools/setup/run-tests --tier long $(ARGS)
	@PYTHON=$(BIN)/python tools/setup/vllm-venv
	$(if $(ARGS),,@$(IN_VLLM)/kills.py)

lint: $(VENV)/.dev ## ruff check and the formatter's check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.dev ## mypy, strict
	@tools/setup/types

format: $(VENV)/.dev ## sort imports, apply safe fixes, format
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench-engine: $(VENV)/.engine ## tokens/s beside other engines, on an idle machine; JSON in benchmarks/results; takes ARGS
	@$(BIN)/python -m specbatch.benchmarks.engine --model demo $(ARGS)
	@$(BIN)/python -m specbatch.benchmarks.engine --model llama-230m $(ARGS)

bench-kernels: $(VENV)/.engine ## every C kernel beside what the processor can do, at every level it has; takes ARGS
	@$(BIN)/python -m specbatch.benchmarks.native_kernels $(ARGS)

bench-memory: $(VENV)/.engine ## what an engine announces beside what it takes; JSON in benchmarks/results
	@$(BIN)/python -m specbatch.benchmarks.memory

bench-exactness: $(VENV)/.engine ## what `exactness: bitwise` costs on the torch path, and what `fast` changes
	@$(BIN)/python -m specbatch.benchmarks.exactness

bench-acceptance: $(VENV)/.engine ## how many drafts of the demo pair each verification keeps, sampled
	@$(BIN)/python -m specbatch.benchmarks.acceptance

bench-trees: $(VENV)/.engine ## where trees of drafts would pay beside chains; takes ARGS
	@$(BIN)/python -m specbatch.benchmarks.trees $(ARGS)

bench-grammars: $(VENV)/.dev ## structured outputs: how many are valid, and what drafts of forced tokens bring; takes ARGS
	@PYTHONPATH=tests $(BIN)/python -m specbatch.benchmarks.grammars $(ARGS)

bench-depth: $(VENV)/.engine ## what auto makes of drafts, beside depth 0 and fixed depths; takes ARGS
	@$(BIN)/python -m specbatch.benchmarks.depth --model demo $(ARGS)
	@$(BIN)/python -m specbatch.benchmarks.depth --model demo --history $(ARGS)
	@$(BIN)/python -m specbatch.benchmarks.depth --model demo --real $(ARGS)
	@$(BIN)/python -m specbatch.benchmarks.depth --model llama-230m $(ARGS)

bench-collapse: $(VENV)/.engine ## drafts that stop fitting in the middle of a job, beside depth 0
	@$(BIN)/python -m specbatch.benchmarks.collapse $(ARGS)

bench-bad-candidates: $(VENV)/.engine ## who stops a bad draft model, and what it cost until then; takes ARGS
	@$(BIN)/python -m specbatch.benchmarks.bad_candidates $(ARGS)

bench-nights: $(VENV)/.engine ## whether a draft model that is trained every night earns more the next one; takes ARGS
	@$(BIN)/python -m specbatch.benchmarks.nights_that_teach $(ARGS)

bench-slow-falls: $(VENV)/.engine ## how soon a slow fall of acceptance is told, and how often falsely; takes ARGS
	@$(BIN)/python -m specbatch.benchmarks.slow_falls $(ARGS)

bench-savings: $(VENV)/.engine ## whether jobs save what they are told to: auto and off in turns, and sham jobs; takes ARGS
	@$(BIN)/python -m specbatch.benchmarks.savings $(ARGS)

bench-overhead: $(VENV)/.dev ## a job's whole path beside the engine alone, on an idle machine; takes ARGS
	@PYTHONPATH=tests $(BIN)/python -m specbatch.benchmarks.overhead $(ARGS)

bench-eta: $(VENV)/.engine ## how far off the shown end of a job is, over twenty jobs; takes ARGS
	@$(BIN)/python -m specbatch.benchmarks.eta $(ARGS)

bench-scale: $(VENV)/.dev ## 1 to 32 verifier processes that wait instead of computing, and what the store takes; takes ARGS
	@PYTHONPATH=tests $(BIN)/python -m specbatch.benchmarks.scale $(ARGS)

bench-ledger: $(VENV)/.dev ## bytes of a token's record in the store, and how many are written a second; takes ARGS
	@PYTHONPATH=tests $(BIN)/python -m specbatch.benchmarks.ledger $(ARGS)

bench-drain: $(VENV)/.dev ## a million rows through all stages but the model: seconds and memory; takes ARGS
	@PYTHONPATH=tests $(BIN)/python -m specbatch.benchmarks.drain $(ARGS)

bench-per-group: $(VENV)/.dev ## what a group takes of every part: processor time, statements, requests, bytes, messages; takes ARGS
	@PYTHONPATH=tests $(BIN)/python -m specbatch.benchmarks.per_group $(ARGS)

bench-report: $(VENV)/.dev ## the report of a job of 100,000 rows: seconds to make, bytes, and how soon a browser opens it; takes ARGS
	@PYTHONPATH=tests $(BIN)/python -m specbatch.benchmarks.job_report $(ARGS)

bench-serve: $(VENV)/.dev ## 200 clients at `specbatch serve`: errors, p99, memory, limits, a job's slowdown; takes ARGS
	@PYTHONPATH=tests $(BIN)/python -m specbatch.benchmarks.serve $(ARGS)

bench-gpu: $(VENV)/.dev ## on a GPU: tests, bits, rooflines of the kernels, tokens/s; takes ARGS
	@$(BIN)/python -m specbatch.benchmarks.gpu $(ARGS)

bench-vllm-nights: $(VENV)/.dev ## 10,000 prompts through the pipeline on vLLM beside vLLM alone, twice; takes ARGS
	@PYTHON=$(BIN)/python tools/setup/vllm-venv
	@OMP_NUM_THREADS=2 $(VENV)-vllm/bin/python -m specbatch.benchmarks.vllm_nights $(ARGS)

bench-vllm: $(VENV)/.dev ## our drafts on vLLM beside vLLM alone, in the environment of test-vllm; takes ARGS
	@PYTHON=$(BIN)/python tools/setup/vllm-venv
	@OMP_NUM_THREADS=2 $(VENV)-vllm/bin/python -m specbatch.benchmarks.vllm $(ARGS)

wheel: $(BIN)/python ## a wheel with the C kernels inside, into ./dist; installing it needs no compiler
	@rm -f dist/specbatch-*.whl
	@$(PIP) wheel --no-deps --wheel-dir dist .
	@if ls dist/specbatch-*-any.whl 2>/dev/null; then \
	    echo "error: this wheel has no C kernels: $(PIP) wheel --verbose . says why" >&2; exit 1; fi
	@ls dist/specbatch-*.whl

docs: $(VENV)/.docs ## the documentation site, into ./site, which needs no server to be read
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open site/index.html"

docs-serve: $(VENV)/.docs ## the same, shown on http://127.0.0.1:8000 and built again when a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean: ## remove caches, build leftovers and the demo's output
	@rm -rf demo-run bench-run site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path "./$(VENV)*" -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## also remove .venv and those beside it
	@rm -rf $(VENV) $(VENV)-airflow $(VENV)-dagster $(VENV)-prefect $(VENV)-light $(VENV)-vllm $(VENV)-*.lock

$(BIN)/python:
	@tools/setup/make-venv "$(PYTHON)" $(VENV)

$(VENV)/.engine: pyproject.toml constraints.txt $(KERNELS) | $(BIN)/python
	@echo "installing specbatch and its engine into $(VENV) (some minutes the first time)"
	@$(PIP) install -c constraints.txt -e '.[engine]'
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what builds the documentation into $(VENV) (a minute the first time)"
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(KERNELS) | $(BIN)/python
	@echo "installing specbatch, its engine and the test tools into $(VENV) (some minutes the first time)"
	@$(PIP) install -c constraints.txt -e '.[engine,s3,postgres,dev]'
	@$(BIN)/python -c 'from specbatch.kernels.native import at_level; at_level(None)'
	@touch $(VENV)/.engine $@
