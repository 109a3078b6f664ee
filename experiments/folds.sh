#!/usr/bin/env bash
# Cross-validation of a training: each fold holds out another part of the training images, the same share of each class.
# Trains the folds in turn, predicts the held-out images with the last weights, and writes a page per run and their
# comparison: mean, interval, and the accuracy over all images, each predicted once, with predictions.csv.
#
#   experiments/folds.sh train_cnn_a.py --data photographs --epochs 20
#   FOLDER=runs/wide experiments/folds.sh --folds 10 --seeds 2 train_cnn_a.py --data photographs --widths 64,128,256
#
#   CONFIG=single_gpu   of accelerate_configs/
# Started again it goes on. Another training needs another FOLDER.
set -euo pipefail
cd "$(dirname "$0")/.."
COMMAND=any SIZE=${SIZE:-full} FOLDS=${FOLDS:-5}
. experiments/steps.sh

[ $# -gt 0 ] || refuse "give the training, as train_cnn_a.py --data photographs"
script=$(basename "$1" .py)
train "${script#train_}" "${CONFIG:-single_gpu}" "$@"
pages
