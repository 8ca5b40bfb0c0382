# Trimtab: `make run` starts the demo, `make test` proves it. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .venv/bin
RUNTIME := .venv/.runtime
DEV := .venv/.dev
NODE := node_modules/.ok
# Not compiled to bytecode here, which takes longer than the rest of it: most of it is never imported.
PIP := ./fetch.sh $(BIN)/pip install --disable-pip-version-check --no-compile --retries 2 -c constraints.txt
STEP := .venv/.step
WORDS := $(patsubst %.po,%.mo,$(wildcard locale/*/LC_MESSAGES/django.po))

.PHONY: help run stop status test check bench kernels chaos setup system words clean

help: ## this list
	@printf 'Trimtab\n\n'
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

run: setup ## set everything up and start the demo (Ctrl-C or `make stop` ends it)
	@$(BIN)/trimtab demo $(ARGS)

stop: ## end what `make run` started, and nothing else
	@if [ -x $(BIN)/trimtab ]; then $(BIN)/trimtab stop; else echo 'Nothing to stop: not set up yet.'; fi

status: ## what runs, how it stands, what it costs
	@if [ -x $(BIN)/trimtab ]; then $(BIN)/trimtab status || true; else echo 'Nothing runs: not set up yet. Try: make run'; fi

setup: $(NODE) $(RUNTIME) $(WORDS) $(STEP) ## Python, front-end files, translations, compiled step

test: $(NODE) $(DEV) $(WORDS) system $(STEP) ## set up what the tests need and run them
	@$(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal $(ARGS)

check: $(NODE) $(DEV) ## lint, types, import rules, Django's own checks
	@echo '· ruff'; $(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .
	@echo '· mypy --strict'; $(BIN)/mypy
	@echo '· import rules'; $(BIN)/lint-imports --no-cache | tail -n 4
	@export TRIMTAB_HOME=$$(mktemp -d) TRIMTAB_PUBLIC_URL=https://trimtab.example; \
	  echo '· manage.py check --deploy'; $(BIN)/python manage.py check --deploy --fail-level WARNING; \
	  echo '· makemigrations --check'; $(BIN)/python manage.py makemigrations --check --dry-run; \
	  rm -rf "$$TRIMTAB_HOME"

bench: $(NODE) $(DEV) $(STEP) ## same-run comparisons; each prints its figures and PASS or FAIL
	@for b in bench/ingest.py bench/loop.py bench/quiet.py bench/capture.py bench/prefix.py bench/kv_dtype.py bench/prefetch.py bench/policies.py bench/engine_costs.py bench/soak.py bench/fragmentation.py bench/diagnosis.py bench/fail_static.py bench/conservation.py bench/failover.py bench/router.py bench/jitter.py bench/smollm2.py bench/engine_peers.py; do echo "== $$b"; $(BIN)/python $$b; done

kernels: $(DEV) ## compile every kernel for three GPUs, on the CPU: registers, spills, memory
	@env -u TRITON_INTERPRET $(BIN)/python -m engine.kernels.build $(ARGS)

chaos: $(NODE) $(DEV) $(STEP) ## kill −9 control plane, agent and engine under load, then count (N=50)
	@$(BIN)/python bench/chaos.py --kills $${N:-50}

words: $(DEV) ## collect the strings of pages into locale/, name those without a translation
	@command -v xgettext >/dev/null || { echo 'No xgettext. On Debian: apt-get install gettext'; exit 1; }
	@export TRIMTAB_HOME=$$(mktemp -d); \
	  $(BIN)/python manage.py makemessages -l zh_Hans --no-wrap --no-obsolete --add-location file \
	    $(addprefix -i ,.venv node_modules tests bench var); rm -rf "$$TRIMTAB_HOME"
	@$(BIN)/python -c 'import polib, sys; [print(entry.msgid) for path in sys.argv[1:] \
	  for entry in polib.pofile(path) if not entry.translated()]' $(WORDS:.mo=.po)

# Only what `make run` makes by itself: a home somebody has named may hold more than a demo's state.
clean: stop ## forget the demo's state (var/), unless TRIMTAB_HOME names another home
	@removed=nothing home=''; \
	if [ "$(abspath $(or $(TRIMTAB_HOME),var))" != "$(abspath var)" ]; then \
	  home='$(TRIMTAB_HOME) (TRIMTAB_HOME)'; \
	elif [ -e var ]; then rm -rf var; removed=var/; fi; \
	left="$$home"; \
	for each in var/ .venv node_modules "$${XDG_CACHE_HOME:-$${HOME:-}/.cache}/trimtab"; do \
	  if [ -e "$$each" ]; then left="$${left:+$$left, }$$each"; fi; \
	done; \
	echo "Removed $$removed.$${left:+ Left: $$left.}"

# pip is the last that is put there: an environment without it was never finished.
$(BIN)/pip:
	@./venv.sh $(PYTHON) $(firstword $(MAKECMDGOALS))

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/pip
	@echo '· Python packages (torch is the large one)'
	@$(PIP) -e '.[engine]'
	@touch $@

# Where gettext is not installed the catalogues are compiled all the same.
%.mo: %.po | $(RUNTIME)
	@echo '· translations'
	@$(BIN)/python -c 'import polib, sys; polib.pofile(sys.argv[1]).save_as_mofile(sys.argv[2])' $< $@

# Compiled once for a machine; an engine that does not find it has it made while it serves.
$(STEP): $(addprefix engine/,exec/build.py exec/compiled.py exec/decode.py kv/pool.py models/llama.py models/packing.py) | $(RUNTIME)
	@echo "· the engine's decode step, compiled (half a minute, once)"
	@if $(BIN)/python -m engine.exec.build; then touch $@; \
	else echo 'Going on without it: decode steps take half as long again.'; fi

$(DEV): pyproject.toml constraints.txt | $(BIN)/pip
	@echo '· Python packages, with those for development'
	@$(PIP) -e '.[engine,kernels,dev]'
	@touch $@ $(RUNTIME)

$(NODE): package.json package-lock.json | $(BIN)/pip
	@echo '· front-end files'
	@./fetch.sh npm ci --loglevel error
	@touch $@

# As root on Debian the tests' own tools are installed; elsewhere their groups are skipped and say so.
system:
	@missing=''; \
	[ -x /usr/bin/chromium ] || missing="$$missing chromium"; \
	command -v xgettext >/dev/null || missing="$$missing gettext"; \
	command -v g++ >/dev/null || missing="$$missing g++"; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "· apt-get install$$missing"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	  else echo "Not installed:$$missing — the tests that need them are skipped."; fi; \
	fi
