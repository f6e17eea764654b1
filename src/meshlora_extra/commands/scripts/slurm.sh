#!/bin/bash
# Written by: @{command}
# Submit it with sbatch in a folder that all nodes see. Asked to stop before the time limit, the run saves; then it is
# queued again, and goes on.
#SBATCH --job-name=@{name}
#SBATCH --partition=@{partition}
#SBATCH --account=@{account}
#SBATCH --nodes=@{nodes}
#SBATCH --ntasks-per-node=@{ranks}
#SBATCH --gpus-per-node=@{gpus}
#SBATCH --cpus-per-task=@{cpus}
#SBATCH --time=@{time}
#SBATCH --signal=USR1@@{stop_before}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  @{if_gpus}
# Ranks meet on the first node of the step, at a port of their own, unless MASTER_ADDR and MASTER_PORT say otherwise.

code=0
srun --kill-on-bad-exit=1 meshlora train @{words} || code=$?
if [ "$code" -eq @{stopped} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
