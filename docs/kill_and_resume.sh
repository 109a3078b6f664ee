#!/usr/bin/env bash
# The session of docs/kill_and_resume.svg: a run is killed, resumed, and compared with one that was not killed.
# CONTRIBUTING.md says how it is recorded. Needs the environment (. .venv/bin/activate) and an empty runs/demo/.
set -euo pipefail
cd "$(dirname "$0")/.."
flags="--data digits --batch_size 16 --checkpoint_every 100 --checkpoint_s 0"

type_in() { # shows a command as if it were typed
    printf '\033[1m$ '
    for ((i = 0; i < ${#1}; i++)); do printf '%s' "${1:i:1}" && sleep 0.02; done
    printf '\033[0m\n'
    sleep 0.5
}

if [ "${1:-}" = before ]; then # the run that is not killed, before the recording
    exec python train_cnn_a.py $flags --output_dir runs/demo/straight
fi
train="python train_cnn_a.py $flags --output_dir runs/demo/killed"
type_in "$train &"
$train &
until grep -q '"step": 450' runs/demo/killed/metrics.jsonl 2>/dev/null; do sleep 0.05; done
echo
type_in "kill -9 $!"
kill -9 $! && wait 2>/dev/null || true
type_in "$train"
$train
type_in "sha256sum runs/demo/*/checkpoints/step_00000890/model.safetensors"
sha256sum runs/demo/*/checkpoints/step_00000890/model.safetensors
sleep 3
