#!/usr/bin/env bash
# Cross-validates a training command. Each fold holds out a different part of the training images, with the same fraction
# of each class. The script trains one fold after another, predicts the held-out images with the last weights,
# and writes a page per run and a comparison. The comparison contains the mean, the interval, and the accuracy
# over all images. predictions.csv contains one prediction per image.
#
#   experiments/folds.sh train_cnn_a.py --data photographs --epochs 20
#   FOLDER=runs/wide experiments/folds.sh --folds 10 --seeds 2 train_cnn_a.py --data photographs --widths 64,128,256
#
#   CONFIG=single_gpu   name of a config file in accelerate_configs/
#
# After an interruption, the same command resumes. A different training command needs a different FOLDER.
set -euo pipefail
cd "$(dirname "$0")/.."
COMMAND=any SIZE=${SIZE:-full} FOLDS=${FOLDS:-5}
. experiments/steps.sh

[ $# -gt 0 ] || refuse "the training is missing. Give a script and its flags, for example train_cnn_a.py --data photographs"
script=$(basename "$1" .py)
train "${script#train_}" "${CONFIG:-single_gpu}" "$@"
pages
