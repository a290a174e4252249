# Every command of kernseal. `make` alone lists them. Needs make, Python >= 3.10 with pip, and nothing else.

SM      ?=
JOBS    ?=
PROFILE ?=
MODEL   ?=
SET     ?=
RETARGET ?=
TEST_JOBS ?= 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules

# The environment is as old as its locks: the stamp's name is their hash. A PYTHON that is asked for by name has a stamp
# of its own, so that asking for another one makes the environment again and not asking takes what is there.
PY      := $(or $(PYTHON),python3)
ENV_IDENTITY := $(shell cat pyproject.toml .ci/environment.py manifests/toolchain/*.lock.txt | cksum | tr ' ' '-')
ENV_ANY := .venv/.ready-$(ENV_IDENTITY)
ENV     := $(ENV_ANY)$(if $(PYTHON),-$(subst /,_,$(PYTHON)))
RUN     := .venv/bin/python

# Python's own switches of the user are not ours.
unexport PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE := 1

$(ENV):
	@"$(PY)" .ci/environment.py "$(ENV_ANY)" "$(ENV)"

need-sm = $(if $(SM),,$(error which SM? Say for example `make $@ SM=120` (90, 100, 103, 120, 121, a comma list, or all)))

.PHONY: help
help: ## list the commands
	@echo 'make artifacts SM=120 [JOBS=N|auto] [RETARGET=90] [PROFILE=default|full]'
	@echo 'make artifacts SM=120 MODEL=config.json [SET="page_size=32 kv_dtype=e4m3"]'
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1 /p' Makefile | while read -r name text; do printf '  %-13s %s\n' "$$name" "$$text"; done
	@echo
	@echo 'SM is 90, 100, 103, 120, 121, a comma list, or all. PYTHON=python3.12 chooses the Python of the environment.'

.PHONY: env
env: $(ENV) ## make the environment (.venv) from the hash locks

.PHONY: artifacts
artifacts: $(ENV) ## build, sign and verify the bundle of one SM
	$(need-sm)
	@.venv/bin/kernseal build --sm "$(SM)" $(strip $(if $(PROFILE),--profile "$(PROFILE)") $(if $(MODEL),--model "$(MODEL)") \
	    $(foreach setting,$(SET),--set "$(setting)") $(if $(RETARGET),--retarget "$(RETARGET)") $(if $(JOBS),--jobs "$(JOBS)"))

.PHONY: gate
gate: $(ENV) ## build and compare every hash with the committed pins
	$(need-sm)
	@.venv/bin/kernseal gate --sm "$(SM)" $(if $(JOBS),--jobs "$(JOBS)")

.PHONY: test
test: lint ## lint, then the whole CPU suite
	@$(RUN) -m pytest tests/cpu -n "$(TEST_JOBS)" --dist loadfile

.PHONY: lint
lint: $(ENV) types ## ruff and mypy --strict
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy build/types/kernseal

# mypy wants the packages where their names say: a tree of links to the folders that are mapped onto them.
PACKAGES := abi export kernels loader loader/integrations manifests patches
.PHONY: types
types:
	@mkdir -p build/types/kernseal && cd build/types/kernseal && for p in $(PACKAGES); do [ -L $${p##*/} ] || ln -s ../../../$$p .; done
	@cd build/types/kernseal && for p in __init__.py py.typed; do [ -L $$p ] || ln -s ../../../loader/package/$$p $$p; done

.PHONY: example-c example-cpp example-rust
example-c: $(ENV) ## build the C example and run it over the recording driver, every error path too
	@command -v cc >/dev/null || { echo 'make example-c: no C compiler (cc) here' >&2; exit 1; }
	@$(RUN) -m pytest tests/cpu/test_abi_examples.py -v -k "c-"

example-cpp: $(ENV) ## the same for the C++ examples
	@command -v c++ >/dev/null || { echo 'make example-cpp: no C++ compiler (c++) here' >&2; exit 1; }
	@$(RUN) -m pytest tests/cpu/test_abi_examples.py -v -k "cpp"

example-rust: $(ENV) ## the same for the Rust crate and its examples
	@command -v cargo >/dev/null || { echo 'make example-rust: no cargo here' >&2; exit 1; }
	@$(RUN) -m pytest tests/cpu/test_abi_examples.py -v -k "rust or crate or pin"

.PHONY: bench
bench: $(ENV) ## time builds (SM=90 unless given); kernels: tests/gpu/run_all.sh, on a GPU
	@.ci/bench $(SM)

.PHONY: lock
lock: $(ENV) ## remake the hash locks and the digests of the wheels they name
	@.ci/lock

.PHONY: clean
clean: ## remove what was built; the environment stays
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis kernseal.egg-info

.PHONY: clean-env
clean-env: ## remove the environment
	rm -rf .venv
