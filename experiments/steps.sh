# Functions that run the steps of an experiment. The scripts in this folder source this file.
#
# Each step prints its command before it runs. The first step that fails ends the experiment, and the next
# start continues with the failed step. A step is skipped if its product exists and FOLDER/steps/ records the
# same command. An interrupted training run resumes from its checkpoint.
#
#   SIZE=rehearsal   size of the experiment: `rehearsal` is small and runs on this machine's CPUs, `full` runs on GPUs
#   DATA=cifar10     data set, which is passed to the train scripts as --data
#   HOSTFILE=hostfile   hostfile for SIZE=full, by default with only this machine. Start the experiment on its first host
#   S3_PREFIX=       s3://bucket/prefix to which the checkpoints of each run are uploaded
#   FOLDER=          folder for the runs, by default runs/experiment_<name>/<size>. Use a new folder for different data or flags
#   LOGBOOK=         folder for the pages, by default the default folder of logbook.py
#   SEEDS=1          number of seeds (0, 1, ...) with which each training command runs, also set by --seeds N
#   FOLDS=           number of folds, each with different held-out images, also set by --folds N
#   DRY_RUN=         1 to print the commands without running them
#   PYTHON=python    Python interpreter for all steps

refuse() {
    echo "error: $1" >&2
    exit 2
}

# check_seeds NUMBER FLAG ends the script with an error unless NUMBER is a positive integer.
check_seeds() {
    [[ $1 =~ ^[1-9][0-9]*$ ]] || refuse "$2${1:-nothing} is not a number of runs. Pass a positive number, for example 5"
}

while [ $# -gt 0 ]; do # the flags of the script that sources this file
    case $1 in
    --seeds) SEEDS=${2-} && shift $(($# > 1)) ;;
    --seeds=*) SEEDS=${1#*=} ;;
    --folds) FOLDS=${2-} && shift $(($# > 1)) ;;
    --folds=*) FOLDS=${1#*=} ;;
    *.py) [ -z "${COMMAND:-}" ] || break ;;&
    *) refuse "unknown flag $1. The flags are --seeds N and --folds N. experiments/steps.sh lists the variables" ;;
    esac
    check_seeds "${SEEDS-1}" "--seeds "
    check_seeds "${FOLDS-2}" "--folds "
    shift
done

SIZE=${SIZE:-rehearsal} DATA=${DATA:-cifar10} HOSTFILE=${HOSTFILE:-hostfile} PYTHON=${PYTHON:-python}
S3_PREFIX=${S3_PREFIX:-} LOGBOOK=${LOGBOOK:-} DRY_RUN=${DRY_RUN:-} SEEDS=${SEEDS:-1} FOLDS=${FOLDS:-}
NAME=experiment_$(basename "$0" .sh)
FOLDER=${FOLDER:-runs/$NAME/$SIZE}
RUNS=() PREDICTIONS=()

check_seeds "$SEEDS" SEEDS=
[ -z "$FOLDS" ] || check_seeds "$FOLDS" FOLDS=
[[ ${BATCH:-1} =~ ^([1-9][0-9]*|largest)$ ]] || refuse "BATCH=$BATCH is neither a number of images nor largest"
case $SIZE in
rehearsal)
    echo "This is a rehearsal: small, and only on the CPUs of this machine"
    export CUDA_VISIBLE_DEVICES=
    ;;
full) ;;
*) refuse "SIZE=$SIZE is neither rehearsal nor full" ;;
esac

TOLD= # set by a signal, even before the step's process exists. The process saves a checkpoint. Ctrl-C reaches the process directly
trap 'TOLD=1; kill -TERM ${!:-} 2>/dev/null || :' TERM
trap TOLD=1 INT

# step NAME PRODUCT WORDS... runs `python WORDS`. PRODUCT is the file that the step writes. If PRODUCT is "", the step
# runs at every start.
step() {
    local name=$1 product=$2 written status=0
    shift 2
    written=$FOLDER/steps/${name//[ ,]/_}
    printf '\n# %s' "$name"
    if is_done "$product" && [ "$(cat "$written" 2>/dev/null)" = "$*" ]; then
        printf ': already done\n'
        return
    fi
    printf '\n%s\n' "$(printf '%q ' "$PYTHON" "$@")"
    [ -z "$DRY_RUN" ] || return 0
    mkdir -p "$FOLDER/steps"
    env --default-signal=INT "$PYTHON" "$@" & # bash makes background processes ignore Ctrl-C
    [ -z "$TOLD" ] || kill -TERM $!
    while kill -0 $! 2>/dev/null; do wait $! || :; done # a signal ends `wait`, but not the step
    wait $! || status=$?
    if [ $status != 0 ]; then
        echo "error: $name failed with exit status $status. The same command resumes with this step" >&2
        exit 1
    fi
    echo "$*" >"$written"
}

is_done() {
    [ -f "$1" ] || return 1
    [[ $1 != */result.json ]] || { grep -q '"status": "finished"' "$1" && ! grep -q '"uploaded": false' "$1"; }
}

# train NAME CONFIG SCRIPT FLAGS... trains in FOLDER/NAME, with launch.py if CONFIG is for several hosts. Additional seeds
# are trained in FOLDER/NAME_seed1 and so on. Folds are trained in FOLDER/NAME_fold1 and so on, and the last weights of
# each fold predict the held-out images.
train() {
    local seed fold name report
    for ((seed = 0; seed < SEEDS; seed++)); do
        for ((fold = 1; fold <= ${FOLDS:-1}; fold++)); do
            name=$1${FOLDS:+_fold$fold}
            [ $seed = 0 ] || name+=_seed$seed
            train_once "$name" "${@:2}" $([ $seed = 0 ] || echo "--seed=$seed") ${FOLDS:+"--fold=$fold/$FOLDS"}
            [ -n "$FOLDS" ] || continue
            report=$FOLDER/$name/validation/held_out
            step "held-out images, $name" "$report/predictions.csv" validate.py "$FOLDER/$name" \
                --which latest --split val "--output_dir=$report"
            PREDICTIONS+=("$report/predictions.csv")
        done
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

# pages [FLAGS...] writes a page for each run, and a comparison. FLAGS are flags of `logbook.py compare`.
pages() {
    local where=(${LOGBOOK:+"--folder=$LOGBOOK"})
    step pages "" logbook.py add "${RUNS[@]}" "${where[@]}"
    if [ -n "$FOLDS" ] && [ -z "$DRY_RUN" ]; then # joins the predictions of all runs, and puts the run's name before each line
        awk -v folder="$FOLDER/" 'FNR == 1 { run = substr(FILENAME, length(folder) + 1); sub("/.*", "", run) }
            NR == 1 { print "run," $0 } FNR > 1 { print run "," $0 }' "${PREDICTIONS[@]}" >"$FOLDER/predictions.csv"
        echo "$FOLDER/predictions.csv"
    fi
    step comparison "" logbook.py compare "${RUNS[@]}" "${where[@]}" "--name=${NAME}_$SIZE" "$@"
}
