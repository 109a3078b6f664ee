#!/usr/bin/env bash
# Trains a CNN with 1, 2 and 4 processes and the same batch size. Then writes a page per run and a comparison
# of the runs.
#
#   DATA=/data/cifar10 experiments/speedup.sh     rehearses with CNN-A
#   SIZE=full experiments/speedup.sh     trains ResNet-18 on 1, 2 and 4 GPUs (not yet measured on GPUs)
#   CONFIGS="single_gpu ddp_2gpu ddp_2x2gpu" SIZE=full experiments/speedup.sh     also trains on two hosts with 2 GPUs each
#   experiments/speedup.sh --seeds 5     trains five times, with the seeds 0 to 4 (the same command resumes)
set -euo pipefail
cd "$(dirname "$0")/.."
. experiments/steps.sh

script=(train_cnn_b.py)
[ "$SIZE" = full ] || script=(train_cnn_a.py --epochs 1 --max_val_images 2000 --log_every 10)
for config in ${CONFIGS:-single_gpu ddp_2gpu ddp_4gpu}; do
    train $config $config "${script[@]}" "--data=$DATA"
done
pages
