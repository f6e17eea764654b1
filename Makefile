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

.PHONY: demo test test-slurm test-wheel proof bench check static lint types house dist setup clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# Two workers, each with ranks of its own: ranks wait for each other, and one pool leaves the cores idle half the time.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# What a change can break: each invariant once, and of the faults that show alike one.
test: static
	$(PYTEST)

# And all else: every family, topology, fault and signal. Some hours on two cores.
proof: test
	$(PYTEST) -m proof

# A real SLURM with two virtual nodes on this machine, started and ended by the tests, and a real mpirun.
SLURM := slurmctld slurmd srun munged mpirun
test-slurm: $(READY)
	@PATH="$$PATH:/usr/sbin"; for name in $(SLURM); do command -v $$name > /dev/null || { \
	    echo "$$name is missing: apt-get install slurmctld slurmd slurm-client munge openmpi-bin"; exit 1; }; done
	$(BIN)/python -m pytest -q -s -m slurm tests/cluster

# The wheel and the source archive, in dist.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist > /dev/null

# The wheel as a stranger installs it: an empty environment, a folder outside the repository.
test-wheel: dist
	$(BIN)/python scripts/try_wheel.py dist/*.whl dist/*.tar.gz

# While one works: below 2 minutes on two cores.
check: static
	$(PYTEST) tests/unit

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
	rm -rf $(VENV) runs dist build
