# Two commands: `make demo` and `make test`. Both make the venv first.
PYTHON ?= python3
VENV ?= .venv
override VENV := $(shell echo $(VENV))
BIN := $(VENV)/bin
DEMO ?= demo
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ifeq ($(shell test -w . && echo yes),yes)
SOURCE := .
else  # setuptools writes beside the sources: of a checkout that cannot be written a copy is installed.
SOURCE := $(VENV)/source
COPY = rm -rf $(SOURCE) && mkdir -p $(SOURCE) && cp -R setup.cfg pyproject.toml README.md LICENSE \
  vjob varuna_core jobs shelf templates reports containers examples $(SOURCE)
endif

.PHONY: demo test quick test-long test-enroot test-containers newest check release bench gpu gpu8 packages docs \
  pictures site clean

$(VENV)/.installed: setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(COPY)
	$(PIP) -e $(SOURCE)
	touch $@

# MLflow lies beside the venv's own packages: DeepSpeed imports it wherever it finds it, which makes each
# of its ranks start half as fast. What DeepSpeed compiles at its first start on a CPU, for a minute or
# two, is compiled here: on a busy machine no time limit of a test would hold.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '$(SOURCE)[dev,docs,train]'
	$(PIP) --upgrade --target $(VENV)/track mlflow-skinny
	PATH="$(abspath $(BIN)):$$PATH" TORCH_EXTENSIONS_DIR=$(abspath $(VENV))/torch_extensions python -c \
	  'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load()' >/dev/null 2>&1 \
	  || echo 'DeepSpeed compiled nothing: its first test may take minutes.'
	touch $@

# Frameworks of others, for the recipes of examples/recipes: in a venv of their own, for some of them use
# one another where they find it. torch and the like are those of the first venv.
FRAMEWORKS := accelerate hydra-core hydra-submitit-launcher jax lightning
# The newest Megatron-LM, for its parser of arguments alone: files for Python 3.12, read by any.
MEGATRON := --upgrade --target $(VENV)/megatron --no-deps --only-binary :all: --ignore-requires-python \
  --python-version 3.12 --platform manylinux_2_28_x86_64 'megatron-core>=0.19'
FRAMEWORKS_PYTHON := $(VENV)/recipes/bin/python
$(VENV)/.installed-recipes: $(VENV)/.installed-dev
	$(PYTHON) -m venv $(VENV)/recipes
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
	  > "$$($(FRAMEWORKS_PYTHON) -c 'import site; print(site.getsitepackages()[0])')/outer.pth"
	for name in $(FRAMEWORKS); do $(FRAMEWORKS_PYTHON) -m pip install --quiet \
	  --disable-pip-version-check -c constraints.txt $$name || echo "No $$name: tests of it are skipped."; done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(MEGATRON) \
	  || echo 'No newest megatron-core: tests of its parser are skipped.'
	touch $@

$(VENV)/.installed-train: $(VENV)/.installed
	@echo 'Installing torch and what else training and report need: some minutes.'
	$(PIP) -e '$(SOURCE)[train,data]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -e '$(SOURCE)[docs]'
	touch $@

# A tiny GPT from raw text on this machine: prepared, trained by four ranks, stopped at step 40,
# taken up at another partition, reported. All of it lies in $(DEMO).
demo: $(VENV)/.installed-train
	mkdir -p $(DEMO)/data
	cp examples/tiny-gpt.yaml $(DEMO)/
	rm -rf $(DEMO)/data/checkpoints
	$(BIN)/python -m tests.corpus > $(DEMO)/data/corpus.jsonl
	$(BIN)/vjob data prepare $(DEMO)/data/corpus.jsonl -o $(DEMO)/data/demo --train 1000 --append-eod --again
	$(BIN)/vjob submit $(DEMO)/tiny-gpt.yaml --set train.steps=40 --follow
	$(BIN)/vjob submit $(DEMO)/tiny-gpt.yaml --set parallel.partition=2-2-2-2 --follow
	$(BIN)/vjob status last
	$(BIN)/vjob report last --text
	$(BIN)/vjob report last

# The Slurm lab and the containers need Debian packages: installed when root, else their tests skip
# and say so.
packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  packages="$$($(PYTHON) -m tests.cluster packages) shellcheck openssh-server charliecloud squashfs-tools podman runc uidmap catatonit chromium firefox-esr tmux zsh fish"; \
	  if ! dpkg -s $$packages >/dev/null 2>&1; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends $$packages >/dev/null; fi; fi

# Four processes on two cores: one of them waits for the lab most of the time. A test that fails is
# run once more, alone: a second failure fails the run. Both runs are shown.
test: packages $(VENV)/.installed-recipes check
	@$(BIN)/python -m pytest -n 4 -m 'not long' --durations 15; code=$$?; \
	  [ $$code = 1 ] || exit $$code; \
	  echo 'The failed tests once more, one after the other:'; \
	  $(BIN)/python -m pytest -m 'not long' --last-failed --last-failed-no-failures none --maxfail 5

# The rooms of pure functions: no run starts.
quick: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m 'not slow and not slurm' tests/test_architecture.py tests/jobs/conf \
	  tests/jobs/monitor/rules tests/jobs/monitor/log_lines tests/varuna_core/facts \
	  tests/varuna_core/records tests/varuna_core/schedule

# More programs, layouts and faults of what `make test` shows once.
test-long: packages $(VENV)/.installed-recipes
	$(BIN)/python -m pytest -n 3 -m long --durations 15

# The container suite in the one RUNTIME that is on the PATH, as this user and, when root, as an
# ordinary one; its page in benchmarks/results is renewed. Says so where the runtime is missing.
RUNTIME ?= enroot
test-containers: $(VENV)/.installed-dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tests.containers.lane $(RUNTIME) --write

test-enroot:
	$(MAKE) test-containers RUNTIME=enroot

# The newest that the ranges of setup.cfg allow, beside the pinned: a venv of its own without
# constraints, made anew each time, and the tests that are quick. NEWEST_TESTS=tests/jobs narrows it.
NEWEST := .venv-newest
NEWEST_EXTRAS ?= dev,docs,train,report
NEWEST_TESTS ?= tests/test_architecture.py tests/test_docs.py tests/test_docs_site.py \
  tests/test_packaging.py tests/jobs tests/reports tests/containers tests/varuna_core
newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$(NEWEST_EXTRAS)]'
	$(NEWEST)/bin/python -m pip freeze --exclude-editable
	$(NEWEST)/bin/python -m pytest -m 'not slow and not slurm and not browser' $(NEWEST_TESTS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Wheel and sdist of the last commit in dist/, and the tests of packaging on these very files.
release: $(VENV)/.installed-dev
	@git diff --quiet HEAD || { echo 'There are changes that are not committed: commit them first.'; exit 1; }
	$(PIP) -e '$(SOURCE)[release]'
	rm -rf dist build/release && mkdir -p dist build/release
	git archive HEAD | tar -x -C build/release
	$(BIN)/python release/build.py build/release dist --url '$(URL)' --epoch $$(git log -1 --format=%ct)
	VJOB_DIST=$(CURDIR)/dist $(BIN)/python -m pytest tests/test_packaging.py
	$(BIN)/python release/try_installed.py dist/*.whl
	@cat dist/SHA256SUMS
	@! grep -m1 'not yet released' CHANGELOG.md || echo 'Before the tag: give it its date.'

# Every figure that is stated, beside its peers; QUICK=1 takes small inputs and some minutes. With
# BEFORE=benchmarks/results/<date>.md each stands beside that of an earlier run.
bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(if $(BEFORE),--before $(BEFORE))

# All that needs a GPU, in parts, with the result page of today. The same command resumes an interrupted
# run; PART="wire stages" repeats these parts; WRITE=1 writes a page ("not run") without a GPU too.
gpu: $(VENV)/.installed-dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m benchmarks.gpu $(if $(PART),--part $(PART)) $(if $(WRITE),--write)

# The same on a machine with several GPUs, such as eight: links, layouts, ZeRO 3; about 20 minutes.
gpu8: $(VENV)/.installed-dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m benchmarks.gpu --several $(if $(PART),--part $(PART)) $(if $(WRITE),--write)

# docs/conf.md and the starter conf of `vjob init` are made from the doc lines of jobs/conf/schema.py,
# the tables of docs/json.md from the types that are printed.
docs: $(VENV)/.installed
	$(BIN)/python -c 'from vjob.jobs.conf.document import render_conf_doc; print(render_conf_doc(), end="")' > docs/conf.part
	mv docs/conf.part docs/conf.md
	PYTHONPATH="$${PYTHONPATH:-.}" $(BIN)/python docs/make/causes_page.py docs/causes.md
	PYTHONPATH="$${PYTHONPATH:-.}" $(BIN)/python docs/make/json_page.py docs/json.md
	PYTHONPATH="$${PYTHONPATH:-.}" $(BIN)/python docs/make/varuna_page.py docs/varuna.md
	$(BIN)/python -m vjob init > docs/conf.part
	mv docs/conf.part tests/jobs/golden/init.yaml

# docs/pictures: the schedules from the lists of actions that the engine runs; screens and pages of
# made-up jobs, by Textual and Chromium.
pictures: packages $(VENV)/.installed-dev
	PYTHONPATH=. $(BIN)/python docs/make/schedules.py docs/pictures/schedules
	PYTHONPATH=. $(BIN)/python docs/make/pictures.py docs/pictures

# The documentation as a site that needs no network: site/index.html. A warning is an error.
site: $(VENV)/.installed-docs docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --clean

clean:
	rm -rf $(VENV) $(NEWEST) build dist site *.egg-info
