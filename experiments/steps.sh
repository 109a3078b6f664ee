# Steps of an experiment; sourced by the scripts beside it.
#
# Each step's command is shown before it runs. The first failing step ends the experiment, and the next start
# continues with it: a step is done if its product exists and FOLDER/steps/ records the same command. An
# interrupted training resumes from its checkpoint.
#
#   SIZE=rehearsal   small, on the CPUs of this machine; SIZE=full is for GPUs
#   DATA=cifar10     --data of the train scripts
#   HOSTFILE=hostfile   the two hosts, for SIZE=full
#   S3_PREFIX=       s3://bucket/prefix for the checkpoints of all runs
#   FOLDER=          folder of the runs; runs/experiment_<name>/<size> by default
#   LOGBOOK=         folder of the pages; logbook.py's by default
#   SEEDS=1          number of runs of each training, one after another, with the seeds 0, 1, ...
#   DRY_RUN=         1: show the commands, and exit
#   PYTHON=python

SIZE=${SIZE:-rehearsal} DATA=${DATA:-cifar10} HOSTFILE=${HOSTFILE:-hostfile} PYTHON=${PYTHON:-python}
S3_PREFIX=${S3_PREFIX:-} LOGBOOK=${LOGBOOK:-} DRY_RUN=${DRY_RUN:-} SEEDS=${SEEDS:-1}
NAME=experiment_$(basename "$0" .sh)
FOLDER=${FOLDER:-runs/$NAME/$SIZE}
RUNS=()

[[ $SEEDS =~ ^[1-9][0-9]*$ ]] || {
    echo "error: SEEDS=$SEEDS: a number of runs" >&2
    exit 2
}
case $SIZE in
rehearsal)
    echo "a rehearsal: small, and on the CPUs of this machine alone"
    export CUDA_VISIBLE_DEVICES=
    ;;
full) ;;
*)
    echo "error: SIZE=$SIZE: rehearsal or full" >&2
    exit 2
    ;;
esac

# step NAME PRODUCT WORDS...: runs `python WORDS`. PRODUCT is a file; with "" the step is always repeated.
step() {
    local name=$1 product=$2 written status=0
    shift 2
    written=$FOLDER/steps/${name//[ ,]/_}
    printf '\n# %s' "$name"
    if is_done "$product" && [ "$(cat "$written" 2>/dev/null)" = "$*" ]; then
        printf ': done already\n'
        return
    fi
    printf '\n%s\n' "$(printf '%q ' "$PYTHON" "$@")"
    [ -z "$DRY_RUN" ] || return 0
    mkdir -p "$FOLDER/steps"
    "$PYTHON" "$@" &
    trap 'kill -TERM $!' TERM # makes it save; Ctrl-C reaches it directly
    wait $! || status=$?
    while kill -0 $! 2>/dev/null; do wait $! || status=$?; done
    if [ $status != 0 ]; then
        echo "error: $name failed with exit status $status: started again it goes on there" >&2
        exit 1
    fi
    echo "$*" >"$written"
}

is_done() {
    [ -f "$1" ] || return 1
    [[ $1 != */result.json ]] || { grep -q '"status": "finished"' "$1" && ! grep -q '"uploaded": false' "$1"; }
}

# train NAME CONFIG SCRIPT FLAGS...: a run in FOLDER/NAME, with launch.py if the config has several hosts; further
# seeds in FOLDER/NAME_seed1, ...
train() {
    local name=$1 seed
    train_once "$@"
    for ((seed = 1; seed < SEEDS; seed++)); do
        train_once "${name}_seed$seed" "${@:2}" "--seed=$seed"
    done
}

train_once() {
    local name=$1 config=$2 launcher=(-m accelerate.commands.launch)
    shift 2
    [ -z "$(hosts_of "$config")" ] || launcher=(launch.py)
    RUNS+=("$FOLDER/$name")
    step "training, $name" "$FOLDER/$name/result.json" "${launcher[@]}" \
        --config_file "accelerate_configs/$config.yaml" $(hosts_of "$config") "$@" \
        "--output_dir=$FOLDER/$name" ${S3_PREFIX:+"--s3=${S3_PREFIX%/}/$SIZE/$name"}
}

hosts_of() {
    case $1 in *_2x*) echo "--hostfile $HOSTFILE" ;; esac
}

# pages [FLAGS OF THE COMPARISON...]: writes a page of each run, and their comparison.
pages() {
    local where=(${LOGBOOK:+"--folder=$LOGBOOK"})
    step pages "" logbook.py add "${RUNS[@]}" "${where[@]}"
    step comparison "" logbook.py compare "${RUNS[@]}" "${where[@]}" "--name=${NAME}_$SIZE" "$@"
}
