# Two commands: `make demo` and `make test`. Both make the venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo

.PHONY: demo test newest check bench bench-gpu packages docs pictures site clean

$(VENV)/.installed: setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,train,report]'
	touch $@

$(VENV)/.installed-train: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,data,report]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# A tiny GPT from raw text on this machine: prepared, trained by four ranks, stopped at step 40,
# taken up at another partition, reported. All of it lies in $(DEMO).
demo: $(VENV)/.installed-train
	mkdir -p $(DEMO)/data
	cp examples/tiny-gpt.yaml $(DEMO)/
	rm -rf $(DEMO)/data/checkpoints
	$(BIN)/python -m varuna_core.data.corpus > $(DEMO)/data/corpus.jsonl
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
	  packages="$$($(PYTHON) -m tests.cluster packages) shellcheck openssh-server charliecloud squashfs-tools podman runc uidmap catatonit chromium"; \
	  if ! dpkg -s $$packages >/dev/null 2>&1; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends $$packages >/dev/null; fi; fi

# Three processes on two cores: one of them waits for the lab most of the time.
test: packages $(VENV)/.installed-dev check
	$(BIN)/python -m pytest -n 3 --durations 15

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

# Every figure that is stated, beside its peers; QUICK=1 takes small inputs and some minutes.
bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick)

bench-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks --gpu $(if $(QUICK),--quick)

# docs/conf.md and the starter conf of `vjob init` are made from the doc lines of jobs/conf/schema.py.
docs: $(VENV)/.installed
	$(BIN)/python -c 'from vjob.jobs.conf.document import render_conf_doc; print(render_conf_doc(), end="")' > docs/conf.part
	mv docs/conf.part docs/conf.md
	$(BIN)/python -m vjob init > docs/conf.part
	mv docs/conf.part tests/jobs/golden/init.yaml

# docs/pictures/schedules: drawn from the lists of actions that the engine runs.
pictures: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python docs/make/schedules.py docs/pictures/schedules

# The documentation as a site that needs no network: site/index.html. A warning is an error.
site: $(VENV)/.installed-docs docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --clean

clean:
	rm -rf $(VENV) $(NEWEST) build dist site *.egg-info
