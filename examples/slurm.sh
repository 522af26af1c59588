#!/bin/bash
# Pretraining on two nodes of eight GPUs under SLURM: sbatch examples/slurm.sh, from the root of the repository, which all
# nodes share, as they share data and runs. docs/multi-node.md has the rest.
#SBATCH --job-name=coat
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --output=slurm-%j.out

set -e
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
PYTHON=${PYTHON:-python}  # that of your environment, at the same path on all nodes

# One task a GPU. Ranks, the first host and a port are read from SLURM's variables; --kill-on-bad-exit ends all tasks soon
# after one has failed. Five minutes before the time is over, SLURM sends SIGTERM to the tasks: they save and leave, and the
# same script continues from there (--load auto).
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$PYTHON" launch/pretrain.py \
    --deepspeed_config "${CONFIG:-configs/deepspeed/zero2.json}" --model "${MODEL:-configs/models/llama2-7b.json}" \
    --data "${DATA:-data/corpus}" --train-steps "${STEPS:-1000}" --warmup-steps 100 \
    --output "${RUN:-runs/7b}" --save "${RUN:-runs/7b}/checkpoints" --save-interval 200 --load auto "$@"
