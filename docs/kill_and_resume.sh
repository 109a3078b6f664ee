#!/usr/bin/env bash
# The session of docs/kill_and_resume.svg: a run is killed, resumed, and compared with one that was not killed.
# CONTRIBUTING.md says how it is recorded. Needs the environment (. .venv/bin/activate) and no runs/demo/.
set -uo pipefail
cd "$(dirname "$0")/.."

# Shows a command as if it were typed, and runs it.
run() {
    printf '\033[1m$'
    for word in $1; do printf ' %s' "$word" && sleep 0.1; done
    printf '\033[0m\n'
    eval "$1"
}

if [ "${1:-}" = before ]; then # the run that is not killed, before the recording
    exec python train_cnn_a.py --data digits --batch_size 16 --epochs 20 --output_dir runs/demo/straight
fi
run 'flags="--data digits --batch_size 16 --epochs 20 --checkpoint_s 0 --output_dir runs/demo/killed"'
run 'timeout --signal KILL 8 python train_cnn_a.py $flags'
run 'python train_cnn_a.py $flags'
run 'sha256sum runs/demo/*/checkpoints/step_00001780/model.safetensors'
for _ in 1 2 3; do sleep 2 && printf '\r'; done # holds the last picture: a recording ends with its last output
