#!/bin/bash
# Written by: @{command}
# Start it on each of the @{nodes} nodes: NODE_RANK=0 bash FILE on the first, NODE_RANK=1 on the next, and so on;
# MASTER_ADDR is the first, as the others reach it.
: "${NODE_RANK:?0 to @{last_node}}" "${MASTER_ADDR:?host of node 0}"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-@{cpus}}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  @{if_gpus}

exec torchrun --nnodes=@{nodes} --nproc-per-node=@{ranks} --node-rank="$NODE_RANK" \
    --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" \
    -m meshlora train @{words}
