#!/bin/bash
# Written by: meshlora launch-script examples/launch/llama-8b.yaml --slurm --nodes 2 --gpus-per-node 8
# Submit it with sbatch in a folder that all nodes see. Asked to stop before the time limit, the run saves; then it is
# queued again, and goes on.
#SBATCH --job-name=llama-8b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# Ranks meet on the first node of the step, at a port of their own, unless MASTER_ADDR and MASTER_PORT say otherwise.

code=0
srun --kill-on-bad-exit=1 meshlora train examples/launch/llama-8b.yaml --resume auto --stopped-exit-code 85 || code=$?
if [ "$code" -eq 85 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
