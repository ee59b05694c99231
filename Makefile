# Every target does its own set-up into .venv, whatever virtual environment the calling shell is in.
#   PYTHON=python3.12          the Python that .venv is made from (3.11 to 3.13)
#   SYSTEM_SITE=1              reuse the packages (say, a CUDA torch) that PYTHON already has; downloads only what is missing
#   TORCH="torch==2.12.0"      the torch to install, as arguments for pip
#   IMPL=exercises             your own file of a stage, for `make stage-N-test`, `-demo` and `-bench`
#   JOBS=4                     how many processes share the tests of `make test` and `make test-slow`
#   ARGS="-k prefix -x"        handed on to pytest, the demo or the benchmark
PYTHON ?= python3
SYSTEM_SITE ?=
TORCH ?= torch==2.13.0
IMPL ?= stages
JOBS ?= 2
ARGS ?=

RUN := .venv/bin/python
STAMP := .venv/setup.json
SETUP = "$(PYTHON)" tools/setup_env.py --torch "$(TORCH)" $(if $(SYSTEM_SITE),--system-site)
# Installs what the extras named after it need; with everything there already it does nothing, and needs no network.
EXTRAS := $(RUN) tools/setup_env.py --extras
# Processes that share the tests, where pytest-xdist is installed.
SHARE = $(shell $(RUN) -c "import xdist" 2>/dev/null && printf %s '-n $(JOBS)')
# Plugins that take seconds to start, and that no test of ours needs in its own process.
QUICK_START := -p no:nbval -p no:schemathesis
ENGINE_BENCHMARKS := throughput sampling latency startup prefix mixed idle ablations
LINTED = $(wildcard stages nanovllm tools training benchmarks tests notebooks examples lectures example.py)

# Images of containers set the last; then each of the many processes that tests start would compile what it imports.
unexport VIRTUAL_ENV PYTHONHOME PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-clients test-gpu models pyodide ladder bench bench-cpu bench-check tune report docs slides scheduler doctor progress notebooks race record replay lint format clean FORCE

# --- set up and test --------------------------------------------------------------------------------------------------

help: ## list the targets
	@awk -F ':.*## ' '/^# --- / { gsub(/^# -+ | -+$$/, ""); print "\n" $$0 } \
	  /^[a-z%-]+:.*## / { sub(/%/, "N", $$1); line = sprintf("  make %-18s", $$1); n = split($$2, words, " "); \
	    for (i = 1; i <= n; i++) { if (length(line) + length(words[i]) >= 80) { print line; line = sprintf("%25s", "") } \
	      line = line " " words[i] } print line }' $(MAKEFILE_LIST)

setup: ## install everything into .venv (PYTHON=..., SYSTEM_SITE=1 to reuse its torch, TORCH=... to choose one)
	$(SETUP)

$(STAMP): pyproject.toml tools/setup_env.py
	$(SETUP)

demo: $(STAMP) ## the main job on the embedded model: text from stages 1 to 5, with its speed
	$(RUN) -m tools.race.demo $(ARGS)

test: $(STAMP) ## the fast tests: a few minutes on two cores, no network, no GPU
	$(RUN) -m pytest $(SHARE) -m "not slow and not gpu" $(QUICK_START) $(ARGS)

test-slow: models pyodide ## the slow tests: a real model, long random runs, every notebook
	$(RUN) -m pytest $(SHARE) -m "slow and not gpu" $(QUICK_START) $(ARGS)

test-clients: models ## every call of the public clients, in environments of their own (2 GB from PyPI); writes docs/clients.md
	$(RUN) -m tests.clients.matrix $(ARGS)

test-gpu: $(STAMP) ## the tests that need a CUDA GPU
	$(RUN) -m pytest -m gpu $(ARGS)

models: $(STAMP) ## fetch and convert SmolLM2-135M-Instruct, once (needs the network)
	$(RUN) -m tools.make_models

pyodide: $(STAMP) ## fetch Python for the browser, once, with npm (needs the network)
	$(RUN) -m tools.scheduler_page.pyodide

# --- one stage: N is its number --------------------------------------------------------------------------------------

stage-%-test: $(STAMP) FORCE ## test stage N (IMPL=exercises tests your own exercises/ instead)
	$(RUN) -m pytest tests/stages --stage $* --impl $(IMPL) $(QUICK_START) $(ARGS)

stage-%-bench: $(STAMP) FORCE ## measure stage N's showcase against stage N-1 and Hugging Face (IMPL=exercises: yours)
	$(RUN) -m benchmarks.stages.stage_bench $* --impl $(IMPL) $(ARGS)

stage-%-notebook: $(STAMP) FORCE ## open stage N's notebook in JupyterLab (ARGS="--allow-root" where you are root)
	$(RUN) -m jupyterlab notebooks/$*_*.ipynb $(ARGS)

stage-%-diff: $(STAMP) FORCE ## what stage N changes against stage N-1
	$(RUN) -m tools.exercises.stage_diff $* $(ARGS)

stage-%-exercise: $(STAMP) FORCE ## write exercises/stage_N_*.py: the stage with holes for you to fill
	$(RUN) -m tools.exercises.exercises $* $(ARGS)

stage-%-mutants: $(STAMP) FORCE ## plant plausible mistakes in stage N and show which test catches each
	$(RUN) -m tools.exercises.mutants $* $(ARGS)

stage-%-demo: $(STAMP) FORCE ## a live view of stage N in the terminal: blocks, queues, text (IMPL=exercises: yours)
	$(RUN) -m tools.race.demo --stage $* --impl $(IMPL) $(ARGS)

# --- one elective: N is its name in stages/stages.toml, such as moe ---------------------------------------------------

elective-%-test: $(STAMP) FORCE ## test elective N (IMPL=exercises tests your own exercises/ instead)
	$(RUN) -m pytest tests/electives --elective $* --impl $(IMPL) -m "not gpu" $(QUICK_START) $(ARGS)

elective-%-exercise: $(STAMP) FORCE ## write exercises/electives/*.py: the elective with holes for you to fill
	$(RUN) -m tools.exercises.exercises $* $(ARGS)

elective-%-mutants: $(STAMP) FORCE ## plant plausible mistakes in elective N and show which test catches each
	$(RUN) -m tools.exercises.mutants $* $(ARGS)

elective-%-demo: $(STAMP) FORCE ## a live view of elective N in the terminal, on a model of its kind
	$(RUN) -m tools.race.demo --elective $* --impl $(IMPL) $(ARGS)

# --- show and measure ------------------------------------------------------------------------------------------------

race: $(STAMP) ## the stages and the engine on one workload, lane by lane (ARGS="--device cuda" on a GPU)
	$(RUN) -m tools.race.race $(ARGS)

record: $(STAMP) ## hold the race and keep it, tokens, times and events, in small files
	$(RUN) -m tools.race.race --record $(ARGS)

replay: $(STAMP) ## show a recorded race, or one engine of it (ARGS="--engine stage_4 --speed 0.5")
	$(RUN) -m tools.race.replay $(ARGS)

ladder: $(STAMP) ## one workload through every stage and Hugging Face, drawn as a picture
	$(RUN) -m benchmarks.stages.stage_bench ladder $(ARGS)

bench: $(STAMP) ## the engine on a GPU, into build/bench (ARGS="--vllm-path DIR": vLLM beside it, from there)
	$(RUN) -m benchmarks.engine $(ENGINE_BENCHMARKS) --out build/bench $(ARGS)

bench-cpu: $(STAMP) ## the engine on a CPU, beside Hugging Face
	$(RUN) -m benchmarks.stages.stage_bench engine smollm2 $(ARGS)

bench-check: $(STAMP) ## compare a fresh quick measurement with the recorded ones
	$(RUN) -m benchmarks.stages.stage_bench 1 2 3 4 5 7 engine --check --rounds 1 $(ARGS)

tune: $(STAMP) ## find this GPU's fastest kernels and keep them for the engine, in 3 minutes (docs/cards.md)
	$(RUN) -m benchmarks.kernels.tune $(ARGS)

report: $(STAMP) ## write the tables of README and docs from benchmarks/results
	$(RUN) -m benchmarks.lib.report $(ARGS)

# --- the course ------------------------------------------------------------------------------------------------------

docs: $(STAMP) ## build the course site into build/docs/html
	$(EXTRAS) docs notebooks
	$(RUN) -m tools.docs.build $(ARGS)

slides: $(STAMP) ## slides of the lectures into build/slides (ARGS="--stage 4" one, "--script 4" its run sheet)
	$(EXTRAS) slides
	$(RUN) -m tools.lectures.slides $(ARGS)

scheduler: $(STAMP) ## be the scheduler: the engine's own in a browser, one HTML file in build (docs and slides have it too)
	$(RUN) -m tools.scheduler_page.build $(ARGS)

doctor: $(STAMP) ## what is the matter with this machine (GPU, memory, ports, leftovers), and what to do about it
	$(RUN) -m tools.doctor

progress: $(STAMP) ## which of your exercises are filled in and pass, and what is next (ARGS=--run tests them)
	$(RUN) -m tools.exercises.progress $(ARGS)

notebooks: $(STAMP) ## run the notebooks' sources again and store their outputs
	$(RUN) -m tools.docs.notebooks $(ARGS)

# --- keep it in order ------------------------------------------------------------------------------------------------

lint: $(STAMP) ## ruff and mypy, as the tests run them
	$(RUN) -m ruff check $(LINTED)
	$(RUN) -m mypy $(filter-out notebooks,$(LINTED))

format: $(STAMP) ## let ruff lay out the code and mend what it can
	$(RUN) -m ruff format $(LINTED)
	$(RUN) -m ruff check --fix $(LINTED)

clean: ## remove .venv and every cache (never exercises/ or the fetched models)
	rm -rf .venv .venv-clients build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
