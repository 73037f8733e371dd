#!/bin/bash
# Start one rank of launch/slurm/train.sbatch, with the variables of torch.distributed set from those of Slurm.
set -eu
export RANK=$SLURM_PROCID
export LOCAL_RANK=$SLURM_LOCALID
export WORLD_SIZE=$SLURM_NTASKS
export LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE:-$((SLURM_NTASKS / ${SLURM_NNODES:-1}))}
recipe=$1
shift
exec "${POD_PYTHON:-python}" "${SLURM_SUBMIT_DIR:-$PWD}/launch/train_pod.py" --config "$recipe" "$@"
