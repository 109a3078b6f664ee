#!/usr/bin/env bash
# Trains a Vision Transformer with FSDP on 4 GPUs, and with DDP on 2 hosts with 4 GPUs each. For each strategy, the script
# finds the largest batch, trains, computes all test metrics of the best checkpoint, and writes a page. Then
# the script compares the runs. The best checkpoint is selected on a tenth of the training images.
#
#   DATA=/data/cifar10 experiments/vit.sh      rehearses FSDP with 2 processes and DDP with 4 processes
#   SIZE=full HOSTFILE=~/hostfile S3_PREFIX=s3://bucket/vit experiments/vit.sh      trains on GPUs (not yet measured)
#   experiments/vit.sh --seeds 5      trains five times, with the seeds 0 to 4 (the same command resumes)
#
#   RECIPE=recipes/vit_b32_cifar10_finetune.yaml   recipe for SIZE=full. vit_b32_cifar10_scratch.yaml trains from random weights
#   BATCH=512        number of images per step, for both strategies (64 in a rehearsal). BATCH=largest multiplies each
#                    strategy's search result by the number of processes. The learning rate does not change
set -euo pipefail
cd "$(dirname "$0")/.."
. experiments/steps.sh

if [ "$SIZE" = full ]; then
    default=512
    script=(train_vit.py --config "${RECIPE:-recipes/vit_b32_cifar10_finetune.yaml}")
    ways="fsdp:fsdp_4gpu:4 ddp:ddp_2x4gpu:8"
else
    default=64
    script=(train_vit.py --model vit_tiny_patch16_224 --image_size 32 --patch_size 4 --drop_path 0 --mixup 0
        --cutmix 0 --ema_decay 0.9 --lr 1e-3 --epochs 1 --max_steps 40 --max_val_images 500 --log_every 5)
    ways="fsdp:fsdp_2gpu:2 ddp:ddp_4gpu:4"
fi
script+=("--data=$DATA")
holdout=(--holdout=0.1)
batch=${BATCH:-$default}

# choose_sizes SEARCH PROCESSES sets the array `sizes`, which contains two flags for the train script. --batch_size is the
# number of images per step. --per_device_batch_size is the largest divisor of a process's share that fits into memory
# according to the file SEARCH. With BATCH=largest, --per_device_batch_size is the whole share.
choose_sizes() {
    local size share total=$batch
    if [ ! -f "$1" ]; then # the file is missing in a dry run
        sizes=("--batch_size=$batch" "--per_device_batch_size=<answer of ${1##*/}>")
        return
    fi
    size=$("$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["answer"])' "$1")
    [ "$batch" != largest ] || total=$((size * $2))
    share=$((total / $2))
    [ "$size" -le "$share" ] || size=$share
    while [ $((share % size)) != 0 ]; do size=$((size - 1)); done
    sizes=("--batch_size=$total" "--per_device_batch_size=$size")
}

searches=()
for way in $ways; do
    IFS=: read -r name config processes <<<"$way"
    search=$FOLDER/${name}_batch.json report=$FOLDER/$name/validation/best
    step "largest batch, $name" "$search" find_batch_size.py --config_file "accelerate_configs/$config.yaml" \
        $(hosts_of "$config") "--output=$search" "${script[@]}" "${holdout[@]}"
    choose_sizes "$search" "$processes"
    train "$name" "$config" "${script[@]}" $([ -n "$FOLDS" ] || echo "${holdout[@]}") "${sizes[@]}"
    [ -n "$FOLDS" ] || step "all metrics, $name" "$report/report.json" validate.py "$FOLDER/$name" "--output_dir=$report"
    searches+=("$search")
done
pages --batch_search "${searches[@]}"
