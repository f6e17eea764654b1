#!/usr/bin/env bash
# Two nodes on one machine: network namespaces with a cable between them, torchrun on each. Needs root, and iproute2.
# Topologies across both against one process, a rank killed, a stale view of the output, a restart: some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "error: network namespaces need root" >&2; exit 2; }
command -v ip >/dev/null || { echo "error: no iproute2 here; apt-get install iproute2" >&2; exit 2; }
ip netns add ml-try 2>/dev/null || { echo "error: no network namespace may be made here" >&2; exit 2; }
ip netns delete ml-try
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-.venv/bin/python}" -m pytest -q -m cluster tests/cluster/test_two_nodes.py "$@"
