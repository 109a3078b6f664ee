#!/usr/bin/env bash
# Makes a bare Debian or Ubuntu machine a host of a training cluster: see --help, and docs/cluster.md for the
# steps before and after. Each step changes only what differs from the wanted state.
set -Eeuo pipefail

help() {
    cat <<'END'
Makes this machine a host of a training cluster: Debian or Ubuntu, as root. A second run changes nothing.

    sudo ./setup_node.sh --repo https://example.com/me/train.git --path /opt/train \
        --host node1=10.0.0.11 --host node2=10.0.0.12 --nfs 10.0.0.5:/export
    sudo ./setup_node.sh --dry-run --cifs //10.0.0.5/shared --cifs_credentials /root/.cifs

It checks the GPU's driver (but installs none), installs missing Debian packages, writes the hosts into
/etc/hosts, mounts drives by lines in /etc/fstab, clones or updates the repository, and runs `make setup`
there. Steps without a flag are left out.

    --host NAME=ADDRESS      a host of the cluster, including this one; repeat the flag. The hosts are one block
                             of /etc/hosts, which is replaced as a whole; without --host it does not change
    --repo URL               the project's git repository; fast-forward only, local changes are refused
    --path FOLDER            the folder of the project, the same on all hosts (default: /opt/train)
    --user NAME              its owner, who also trains (default: the caller of sudo, else root)
    --nfs SERVER:/EXPORT     a shared drive
    --cifs //SERVER/SHARE    a shared drive of Windows or Samba
    --cifs_credentials FILE  lines username=..., password=...; mode 600
    --mount FOLDER           mount point of the shared drive (default: /mnt/shared)
    --s3_mount BUCKET[:/PATH]  a bucket of S3 as a folder, by s3fs: for reading data, not for checkpoints
    --s3_credentials FILE    a line KEY:SECRET; mode 600 (default: the role of the machine)
    --mount_s3 FOLDER        mount point of the bucket (default: /mnt/s3)
    --dry-run                show each change, and make none
    --help                   show this text

Exit status: 0 when the host is ready; 1 when it is not, also for a GPU without a driver; 2 for a wrong flag.
END
}

FLAGS=(--host --repo --path --user --nfs --cifs --cifs_credentials --mount --s3_mount --s3_credentials)
FLAGS+=(--mount_s3 --dry_run --help)
PACKAGES=(python3-venv make git g++ openssh-server openssh-client iproute2 pdsh)
BEGIN="# BEGIN hosts of the training cluster (setup_node.sh)"
END="# END hosts of the training cluster"
LOCK_S=300  # wait for apt's lock, which a new machine's own upgrades may hold
MOUNT_S=90  # wait for a server's answer

repo="" path="" user="" nfs="" cifs="" cifs_credentials="" mount="" s3_mount="" s3_credentials="" mount_s3=""
dry_run="" home="" scratch="" not_ready="" said="" explained="" where="what was under way"
hosts=() missing=()
changes=0 warnings=0

main() {
    export PATH="$PATH:/usr/sbin:/sbin"
    trap 'where="line $LINENO: $BASH_COMMAND"' ERR
    trap finish EXIT
    parse "$@"
    check_flags
    scratch=$(mktemp -d)
    cd / # other users can't enter root's home
    check_driver
    install_packages
    write_hosts
    check_own_name
    mount_shared
    mount_bucket
    update_repository
    summary
}

# --- Output

say() { echo "ok: $1"; }

warn() {
    warnings=$((warnings + 1))
    echo "warning: $*"
}

die() {
    explained=yes
    echo "error: $1" >&2
    exit "${2:-1}"
}

# Runs at every exit: removes temporary files, and names the step that failed.
finish() {
    local status=$?
    [ -z "$scratch" ] || rm -rf "$scratch"
    ((status == 0)) || [ -n "$explained" ] || echo "error: $where failed" >&2
}

# Prints a change. False in a dry run.
change() {
    changes=$((changes + 1))
    if [ -n "$dry_run" ]; then
        echo "would: $1"
        return 1
    fi
    echo "change: $1"
}

summary() {
    local what="nothing to do"
    if ((changes > 0)); then what="$(count "$changes" change) ${dry_run:+to make, dry run: none }made"; fi
    if ((warnings > 0)); then what+=", $(count "$warnings" warning)"; fi
    echo "$(hostname): $what${not_ready:+; NOT READY: $not_ready}"
    explained=yes
    [ -z "$not_ready" ] || exit 1
}

count() { if (($1 == 1)); then echo "1 $2"; else echo "$1 $2s"; fi; }

# --- Flags

parse() {
    local flag value
    while (($# > 0)); do
        flag=${1%%=*} value=${1#*=}
        [[ $flag == --* ]] || die "$1 is no flag; --help shows them" 2
        flag=--$(tr - _ <<<"${flag#--}")
        case $flag in
            --help) help && exit 0 ;;
            --dry_run) dry_run=yes && shift && continue ;;
        esac
        known "$flag"
        if [[ $1 != *=* ]]; then
            (($# > 1)) || die "$flag needs a value" 2
            value=$2
            shift
        fi
        shift
        [[ -n $value && $value != --* ]] || die "$flag needs a value" 2
        case $flag in
            --host) hosts+=("$value") ;;
            *) once "${flag#--}" "$value" ;;
        esac
    done
}

once() {
    [ -z "${!1}" ] || die "--$1 is given twice" 2
    printf -v "$1" %s "$2"
}

known() {
    [[ " ${FLAGS[*]} " == *" $1 "* ]] || die "unknown flag $1: did you mean $(nearest "$1")?" 2
}

# The flag with the smallest Levenshtein distance to the word.
nearest() {
    printf '%s\n' "${FLAGS[@]}" | awk -v word="$1" '
        function least(a, b, c) { return a < b ? (a < c ? a : c) : (b < c ? b : c) }
        function distance(a, b,    i, j, d) {
            for (i = 0; i <= length(a); i++) d[i, 0] = i
            for (j = 0; j <= length(b); j++) d[0, j] = j
            for (i = 1; i <= length(a); i++)
                for (j = 1; j <= length(b); j++)
                    d[i, j] = least(d[i - 1, j] + 1, d[i, j - 1] + 1, \
                                    d[i - 1, j - 1] + (substr(a, i, 1) != substr(b, j, 1)))
            return d[length(a), length(b)]
        }
        { d = distance(word, $0); if (NR == 1 || d < best) { best = d; flag = $0 } }
        END { print flag }'
}

# Finds mistakes before anything is changed.
check_flags() {
    command -v apt-get >/dev/null || die "this is neither Debian nor Ubuntu: there is no apt-get"
    [ -n "$dry_run" ] || [ "$(id -u)" = 0 ] || die "this needs root: put sudo before it, or give --dry-run"
    user=${user:-${SUDO_USER:-$(id -un)}}
    home=$(getent passwd "$user" | cut -d: -f6) || true
    [ -n "$home" ] || die "--user $user: there is no such user" 2
    [ -z "$path" ] || [ -n "$repo" ] || die "--path needs --repo" 2
    [[ ! $repo =~ ^https?://[^/]*@|://[^/@]*:[^/@]*@ ]] ||
        die "--repo holds a password or token: use a key for ssh, or git's credential helper" 2
    path=${path:-/opt/train}
    check_path --path "$path"
    check_hosts
    check_drives
}

check_path() {
    [[ $2 =~ ^(/[A-Za-z0-9._-]+)+$ ]] || die "$1 $2: a path from / on, of letters, digits, dots, - and _" 2
}

check_hosts() {
    local entry name address seen=" "
    for entry in "${hosts[@]}"; do
        name=${entry%%=*} address=${entry#*=}
        # A name as in the hostfile: tools/launch/hosts.py.
        [[ $entry == *=* && $name =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]*$ ]] ||
            die "--host $entry: give NAME=ADDRESS" 2
        is_address "$address" || die "--host $entry: $address is no IP address" 2
        [[ $address != 127.* && $address != ::1 ]] ||
            die "--host $entry: other hosts can't reach a loopback address" 2
        [ "$name" != localhost ] || die "--host $entry: localhost is each host itself" 2
        [[ $seen != *" $name "* ]] || die "--host $name is given twice" 2
        seen+="$name "
    done
}

is_address() {
    local part
    [[ $1 =~ ^[0-9a-fA-F]*:[0-9a-fA-F:]*:[0-9a-fA-F]*$ ]] && return
    [[ $1 =~ ^([0-9]{1,3}\.){3}[0-9]{1,3}$ ]] || return
    for part in ${1//./ }; do ((10#$part <= 255)) || return; done
}

check_drives() {
    [ -z "$nfs" ] || [ -z "$cifs" ] || die "--nfs and --cifs: give one of them, there is one --mount" 2
    [ -n "$nfs$cifs" ] || [ -z "$mount" ] || die "--mount needs --nfs or --cifs" 2
    [ -n "$cifs" ] || [ -z "$cifs_credentials" ] || die "--cifs_credentials needs --cifs" 2
    [ -z "$cifs" ] || [ -n "$cifs_credentials" ] || die "--cifs needs --cifs_credentials FILE" 2
    [ -n "$s3_mount" ] || [ -z "$mount_s3$s3_credentials" ] ||
        die "--mount_s3 and --s3_credentials need --s3_mount" 2
    mount=${mount:-/mnt/shared} mount_s3=${mount_s3:-/mnt/s3}
    check_path --mount "$mount"
    check_path --mount_s3 "$mount_s3"
    [ "$mount" != "$mount_s3" ] || die "--mount and --mount_s3 are the same folder" 2
    [[ -z $nfs || $nfs =~ ^[A-Za-z0-9._-]+:/[^[:space:],]*$ ]] || die "--nfs $nfs: give SERVER:/EXPORT" 2
    [[ -z $cifs || $cifs =~ ^//[A-Za-z0-9._-]+/[^[:space:],]+$ ]] || die "--cifs $cifs: give //SERVER/SHARE" 2
    [[ -z $s3_mount || $s3_mount =~ ^[a-z0-9][a-z0-9.-]+(:/[^[:space:],]*)?$ ]] ||
        die "--s3_mount $s3_mount: give BUCKET or BUCKET:/PATH" 2
    [ -z "$cifs_credentials" ] || check_path --cifs_credentials "$cifs_credentials"
    [ -z "$s3_credentials" ] || check_path --s3_credentials "$s3_credentials"
    check_secret --cifs_credentials "$cifs_credentials" '^[[:space:]]*username *=' "username=..."
    check_secret --s3_credentials "$s3_credentials" '^[^[:space:]]+:[^[:space:]]+$' "KEY:SECRET"
}

# Checks that only its owner can read the file. Its content is never shown. A dry run shows its plan all the same.
check_secret() {
    local problem
    problem=$(secret_problem "$@")
    [ -z "$problem" ] || [ -n "$dry_run" ] || die "$problem"
    [ -z "$problem" ] || warn "$problem"
}

secret_problem() {
    local flag=$1 file=$2 mode
    if [ -z "$file" ]; then
        return
    elif [ ! -f "$file" ]; then
        echo "$flag $file: there is no such file"
        return
    fi
    mode=$(stat -L -c %a "$file")
    if [[ $mode != 600 && $mode != 400 ]]; then
        echo "$flag $file: its mode is $mode: chmod 600 $file"
    elif [ ! -r "$file" ]; then
        echo "$flag $file can't be read by $(id -un)"
    elif ! grep -Eq "$3" "$file"; then
        echo "$flag $file has no line $4"
    fi
}

# --- Driver

check_driver() {
    local found query=("--query-gpu=name,driver_version" "--format=csv,noheader")
    if found=$(nvidia-smi "${query[@]}" 2>/dev/null) && [ -n "$found" ]; then
        found=$(sort <<<"$found" | uniq -c | sed 's/^ *\([0-9]*\) \(.*\), /\1 x \2, driver /')
        say "${found//$'\n'/; }"
    elif gpu_on_bus; then
        not_ready="there is an NVIDIA GPU, but no driver that works"
        warn "$not_ready, and this script installs none. Ubuntu: apt-get install ubuntu-drivers-common," \
            "then ubuntu-drivers install. Debian: apt-get install linux-headers-amd64 nvidia-driver," \
            "with non-free in the sources. Then reboot, and run this again when" \
            "nvidia-smi lists the GPUs"
    else
        say "no NVIDIA GPU: this is a host for rehearsals on the CPU"
    fi
}

# NVIDIA's number at PCI is 0x10de; 0x03.... is the class of displays and 3D controllers.
gpu_on_bus() {
    local device
    for device in /sys/bus/pci/devices/*; do
        if grep -qs 0x10de "$device/vendor" && grep -qs '^0x03' "$device/class"; then return; fi
    done
    return 1
}

# --- Packages

install_packages() {
    local package said
    for package in "${PACKAGES[@]}"; do need "$package"; done
    [ -z "$cifs" ] || need cifs-utils
    [ -z "$nfs" ] || need nfs-common
    [ -z "$s3_mount" ] || need s3fs
    if ((${#missing[@]} == 0)); then
        say "packages: all are there"
    elif change "install ${missing[*]}"; then
        until said=$(LC_ALL=C apt-get update -q 2>&1); do # it does not wait for its lock by itself
            [[ $said == *"Could not get lock"* ]] && ((SECONDS < LOCK_S)) && sleep 5 && continue
            echo "$said" >&2
            die "apt-get update failed, see above"
        done
        DEBIAN_FRONTEND=noninteractive apt-get -o "DPkg::Lock::Timeout=$LOCK_S" install -qy \
            --no-install-recommends "${missing[@]}" || die "apt-get install failed, see above"
    fi
}

need() { there "$1" || missing+=("$1"); }

# Checks for the program, not for Debian's package, as it may come from elsewhere.
there() {
    case $1 in
        python3-venv) python3 -c "import venv, ensurepip" 2>/dev/null ;;
        openssh-client) command -v ssh ssh-keyscan ;;
        openssh-server) command -v sshd ;;
        iproute2) command -v ip ;;
        cifs-utils) command -v mount.cifs ;;
        nfs-common) command -v mount.nfs ;;
        *) command -v "$1" ;;
    esac >/dev/null
}

# --- /etc/hosts

write_hosts() {
    local names=" " entry
    if ((${#hosts[@]} == 0)); then return; fi
    whole_block
    for entry in "${hosts[@]}"; do
        names+="${entry%%=*} "
        printf '%s %s\n' "${entry#*=}" "${entry%%=*}"
    done >"$scratch/block"
    with_block "$names" <"$(or_empty /etc/hosts)" >"$scratch/new"
    put /etc/hosts
    named_twice "$names"
    if grep -Eqrs '^manage_etc_hosts: *([Tt]rue|template)' /etc/cloud/cloud.cfg /etc/cloud/cloud.cfg.d; then
        warn "cloud-init writes /etc/hosts anew when this machine starts: say manage_etc_hosts: false" \
            "in /etc/cloud/cloud.cfg.d/99-train.cfg"
    fi
}

# If one of its marker lines were missing, lines after the block would count as part of it.
whole_block() {
    local file
    file=$(or_empty /etc/hosts)
    [ "$(grep -cxF "$BEGIN" "$file")" = "$(grep -cxF "$END" "$file")" ] ||
        die "/etc/hosts has only one of the lines '$BEGIN' and '$END': remove it"
}

# Prints the file with the block in its old place, or at the end. It removes the loopback address that Debian gives
# a host's own name (127.0.1.1): torchrun's c10d and gloo look up their own name, and others can't reach them there.
with_block() {
    awk -v begin="$BEGIN" -v end="$END" -v names="$1" -v block="$scratch/block" '
        function put_block(    line) {
            if (done++) return
            print begin
            while ((getline line < block) > 0) print line
            print end
        }
        $0 == begin { inside = 1; put_block(); next }
        inside { if ($0 == end) inside = 0; next }
        /^[[:space:]]*(127\.|::1[[:space:]])/ {
            kept = $1; found = count = 0
            for (i = 2; i <= NF && $i !~ /^#/; i++) {
                if (index(names, " " $i " ")) found = 1
                else { kept = kept " " $i; count++ }
            }
            for (; i <= NF; i++) kept = kept " " $i
            if (found && count) print kept
            if (found) next
        }
        { print }
        END { put_block() }'
}

# Warns of lines outside of the block that also give one of the names.
named_twice() {
    local line
    while read -r line; do
        warn "/etc/hosts has another line for a host of the block: $line"
    done < <(awk -v begin="$BEGIN" -v end="$END" -v names="$1" '
        $0 == begin { inside = 1 }
        $0 == end { inside = 0 }
        !inside && !/^[[:space:]]*(#|127\.|::1[[:space:]])/ {
            for (i = 2; i <= NF && $i !~ /^#/; i++) if (index(names, " " $i " ")) { print; next }
        }' "$(or_empty /etc/hosts)")
}

check_own_name() {
    local own address entry
    own=$(hostname)
    if ((${#hosts[@]} > 0)); then
        for entry in "${hosts[@]}"; do
            if [ "${entry%%=*}" = "$own" ]; then
                is_mine "${entry#*=}" ||
                    warn "--host $entry is this host, but it has no such address: see ip -brief address"
                return 0 # its loopback address is, or would be, removed
            fi
        done
        warn "no --host has this host's name, $own"
    fi
    address=$(getent ahostsv4 "$own" | awk 'NR == 1 { print $1 }') || true
    [[ $address != 127.* ]] ||
        warn "this host's own name, $own, is $address here: torchrun's c10d and gloo would take it for the" \
            "address at which others reach it. Give --host $own=ITS_ADDRESS"
}

is_mine() { ! there iproute2 || [ -n "$(ip -oneline address show to "$1")" ]; }

or_empty() { if [ -e "$1" ]; then echo "$1"; else echo /dev/null; fi; }

# Replaces a file by $scratch/new, or overwrites it if it can't be replaced, as in a container.
put() {
    local file=$1 next
    if cmp -s "$scratch/new" "$file"; then
        say "$file"
        return
    fi
    change "$file:" || true
    diff -U0 "$(or_empty "$file")" "$scratch/new" | sed -n '3,$ s/^[-+]/    &/p' || true
    [ -z "$dry_run" ] || return 0
    next=$(mktemp "$file.XXXXXX")
    cat "$scratch/new" >"$next"
    if [ -e "$file" ]; then chmod --reference="$file" "$next"; else chmod 644 "$next"; fi
    mv -f "$next" "$file" 2>/dev/null || { cat "$next" >"$file" && rm -f "$next"; }
}

# --- Drives

mount_shared() {
    local ids
    ids="uid=$(id -u "$user"),gid=$(id -g "$user")"
    if [ -n "$nfs" ]; then drive "$nfs" "$mount" nfs _netdev,nofail "$nfs"; fi
    if [ -n "$cifs" ]; then
        drive "$cifs" "$mount" cifs "credentials=$cifs_credentials,$ids,_netdev,nofail" "$cifs"
    fi
}

mount_bucket() {
    local who="iam_role=auto"
    if [ -z "$s3_mount" ]; then return; fi
    [ -z "$s3_credentials" ] || who="passwd_file=$s3_credentials"
    who+=",uid=$(id -u "$user"),gid=$(id -g "$user")"
    drive "$s3_mount" "$mount_s3" fuse.s3fs "$who,allow_other,_netdev,nofail" s3fs
}

# Mounts a drive, and then adds its line to /etc/fstab. shown: the source that findmnt lists for it.
drive() {
    local source=$1 folder=$2 type=$3 options=$4 shown=$5 line other mounted said
    line="$source $folder $type $options 0 0"
    other=$(awk -v folder="$folder" '$1 !~ /^#/ && $2 == folder' "$(or_empty /etc/fstab)")
    [[ -z $other || $other == "$line" ]] || die "/etc/fstab mounts something else on $folder, remove: $other"
    mounted=$(findmnt --noheadings --output SOURCE --mountpoint "$folder") || true
    [[ -z $mounted || $mounted == "$shown" ]] || die "$mounted is mounted on $folder already: umount $folder"
    if [ -n "$mounted" ]; then
        say "$source is mounted on $folder"
    elif change "mount $source on $folder"; then
        mkdir -p "$folder"
        said=$(timeout "$MOUNT_S" mount -t "$type" -o "$options" "$source" "$folder" 2>&1) ||
            die "mounting $source on $folder: $(one_line "${said:-no answer within $MOUNT_S s}")"
    fi
    { end_of_line_added /etc/fstab && { [ -n "$other" ] || echo "$line"; }; } >"$scratch/new"
    put /etc/fstab
}

# Prints the file, with a newline at its end.
end_of_line_added() { awk 1 "$(or_empty "$1")"; }

# --- Repository

update_repository() {
    if [ -z "$repo" ]; then return; fi
    if [ ! -e "$path" ] || [ -z "$(ls -A "$path")" ]; then
        clone
    elif there git; then
        fast_forward
    else
        say "$path can be looked at when git is installed"
    fi
    make_setup
}

clone() {
    if change "clone the repository into $path"; then
        mkdir -p "$(dirname "$path")"
        install -d -o "$user" -g "$(id -g "$user")" "$path"
        must as_user git clone --quiet -- "$repo" "$path"
    fi
}

fast_forward() {
    local changed branch here newest
    in_repo rev-parse --git-dir >/dev/null 2>&1 ||
        die "$path is no git repository that $user can use: move it away"
    [ "$(in_repo remote get-url origin 2>/dev/null)" = "$repo" ] ||
        die "$path is a clone of another repository than --repo: git -C $path remote -v"
    changed=$(in_repo status --porcelain --untracked-files=no | awk 'NR <= 3 { print $2 }' | paste -sd ' ')
    [ -z "$changed" ] || die "$path has local changes, which are left alone ($changed): push or stash them"
    branch=$(in_repo symbolic-ref --short --quiet HEAD) ||
        die "$path is on no branch: git -C $path switch BRANCH"
    must in_repo ls-remote --exit-code origin "refs/heads/$branch"
    newest=$(awk -v ref="refs/heads/$branch" '$2 == ref { print $1 }' <<<"$said") # ssh may say more
    here=$(in_repo rev-parse HEAD)
    if [ "$here" = "$newest" ]; then
        say "$path is at ${here:0:10} of $branch"
    elif in_repo merge-base --is-ancestor "$newest" HEAD 2>/dev/null; then
        die "$path has commits that --repo has not: push them"
    elif change "update $path from ${here:0:10} to ${newest:0:10} of $branch"; then
        must in_repo fetch --quiet origin "$branch"
        in_repo merge-base --is-ancestor HEAD FETCH_HEAD ||
            die "$path and --repo have each commits that the other has not: rebase and push"
        must in_repo merge --quiet --ff-only FETCH_HEAD
    fi
}

make_setup() {
    if [ -d "$path" ] && there make && as_user make --silent --question -C "$path" setup >/dev/null 2>&1; then
        say "make setup: nothing to do"
    elif change "make setup in $path"; then
        as_user make --no-print-directory -C "$path" setup || die "make setup in $path failed, see above"
    fi
}

in_repo() { as_user git -C "$path" "$@"; }

# Runs a command as the user who trains, with their keys, without questions, without writing git's index.
as_user() {
    local settings=(GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0 GIT_SSH_COMMAND="ssh -o BatchMode=yes")
    if [ "$user" = "$(id -un)" ]; then
        env "${settings[@]}" "$@"
    else
        runuser -u "$user" -- env "HOME=$home" "${settings[@]}" "$@"
    fi
}

# Runs a command that must succeed. Its output is in $said, and is the error message.
must() {
    said=$("$@" 2>&1) || die "$(one_line "$said") (${*:2:4} ...)"
}

# Prints the reasons of ssh and git in one line, else the last line.
one_line() {
    local reasons
    reasons=$(grep -E '^(fatal|error): |verification failed|denied' <<<"$1" | paste -sd ' ') || true
    if [ -n "$reasons" ]; then echo "$reasons"; else tail -n 1 <<<"$1"; fi
}

main "$@"
