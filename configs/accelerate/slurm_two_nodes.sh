#!/bin/bash
# Two nodes of eight GPUs under SLURM: sbatch configs/accelerate/slurm_two_nodes.sh CONFIG [KEY=VALUE]...
# Not yet run on a GPU, and not yet run under SLURM. LAUNCH names another launch configuration of two
# machines: LAUNCH=gpu16_two_nodes_fsdp2 sbatch … CONFIG
#
# SLURM sends SIGTERM to every node ten minutes before the time limit: all processes then save and end
# with 0. The same command with --resume RUN in place of CONFIG continues.
#SBATCH --job-name=longrnn
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
set -eu

export FIRST_NODE PORT LAUNCH
LAUNCH=${LAUNCH:-gpu16_two_nodes}
FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((20000 + SLURM_JOB_ID % 20000)) # another one for every job

# One launcher per node; SLURM_NODEID differs between them, so it is read there.
srun --kill-on-bad-exit=1 bash -c 'exec longrnn launch \
  --config_file "$LAUNCH" \
  --machine_rank "$SLURM_NODEID" --main_process_ip "$FIRST_NODE" --main_process_port "$PORT" \
  train "$@" mixed_precision=bf16' longrnn "$@"
