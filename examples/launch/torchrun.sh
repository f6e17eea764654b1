#!/bin/bash
# Written by: meshlora launch-script examples/launch/llama-8b.yaml --torchrun --nodes 2 --gpus-per-node 8
# Start it on each of the 2 nodes: NODE_RANK=0 bash FILE on the first, NODE_RANK=1 on the next, and so on;
# MASTER_ADDR is the first, as the others reach it.
: "${NODE_RANK:?0 to 1}" "${MASTER_ADDR:?host of node 0}"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

exec torchrun --nnodes=2 --nproc-per-node=8 --node-rank="$NODE_RANK" \
    --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" \
    -m meshlora train examples/launch/llama-8b.yaml --resume auto --stopped-exit-code 85
