#!/usr/bin/env bash
# Turns a bare Debian or Ubuntu machine into a host of a training cluster. --help describes the flags, and
# docs/cluster.md describes the steps before and after this script. Each step changes only settings that differ from the
# required settings.
set -Eeuo pipefail

help() {
    cat <<'END'
Turns this Debian or Ubuntu machine into a host of a training cluster. Run the script as root. A second run
changes nothing.

    sudo ./setup_node.sh --repo https://example.com/me/train.git --path /opt/train \
        --host node1=10.0.0.11 --host node2=10.0.0.12 --nfs 10.0.0.5:/export
    sudo ./setup_node.sh --dry-run --cifs //10.0.0.5/shared --cifs_credentials /root/.cifs

The script checks the GPU driver (but does not install a driver), installs missing Debian packages, writes the
hosts into /etc/hosts, mounts drives through lines in /etc/fstab, clones or updates the repository, and runs
`make setup` in the repository. The script skips every step whose flag is missing.

    --host NAME=ADDRESS      name and address of a host in the cluster. Repeat the flag for each host, including
                             this host. The script replaces one block in /etc/hosts with these hosts. Without
                             --host, the block does not change
    --repo URL               URL of the project's git repository. The script only fast-forwards the clone, and
                             stops if the clone contains local changes
    --path FOLDER            folder of the project, the same on all hosts (default: /opt/train)
    --user NAME              user who trains and owns the folder (default: the user who called sudo, or root)
    --nfs SERVER:/EXPORT     shared NFS drive to mount
    --cifs //SERVER/SHARE    shared Windows or Samba drive to mount
    --cifs_credentials FILE  file of mode 600 with the lines username=... and password=...
    --mount FOLDER           mount point of the shared drive (default: /mnt/shared)
    --s3_mount BUCKET[:/PATH]  S3 bucket to mount as a folder with s3fs. Use the folder only to read data, and not
                             to store checkpoints
    --s3_credentials FILE    file of mode 600 with the line KEY:SECRET (default: the machine's role)
    --mount_s3 FOLDER        mount point of the bucket (default: /mnt/s3)
    --dry-run                print all changes without making them
    --help                   print this help text

Exit status: 0 if the host is ready, 1 if the host is not ready (for example if a GPU has no driver), and 2 if a
flag is wrong.
END
}

FLAGS=(--host --repo --path --user --nfs --cifs --cifs_credentials --mount --s3_mount --s3_credentials)
FLAGS+=(--mount_s3 --dry_run --help)
PACKAGES=(python3-venv make git g++ openssh-server openssh-client iproute2 pdsh)
BEGIN="# BEGIN hosts of the training cluster (setup_node.sh)"
END="# END hosts of the training cluster"
LOCK_S=300  # maximum seconds to wait for apt's lock, which a new machine's automatic upgrades may hold
MOUNT_S=90  # maximum seconds to wait for a file server's response

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
    cd / # root's home folder is not accessible to other users
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

# Runs at every exit. Removes temporary files, and prints the name of the step that failed.
finish() {
    local status=$?
    [ -z "$scratch" ] || rm -rf "$scratch"
    ((status == 0)) || [ -n "$explained" ] || echo "error: $where failed" >&2
}

# Prints a change that the script makes. Returns false in a dry run.
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
        [[ $flag == --* ]] || die "$1 is not a flag. Use --help to list all flags" 2
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
    [ -z "${!1}" ] || die "--$1 is specified twice. Remove one of the two flags" 2
    printf -v "$1" %s "$2"
}

known() {
    [[ " ${FLAGS[*]} " == *" $1 "* ]] || die "unknown flag $1. Did you mean $(nearest "$1")?" 2
}

# Prints the known flag at the smallest Levenshtein distance from a word.
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

# Finds mistakes in the flags before the script changes any settings.
check_flags() {
    command -v apt-get >/dev/null || die "this machine has no apt-get. Use a machine with Debian or Ubuntu"
    [ -n "$dry_run" ] || [ "$(id -u)" = 0 ] || die "this script needs root. Run it with sudo, or with --dry-run"
    user=${user:-${SUDO_USER:-$(id -un)}}
    home=$(getent passwd "$user" | cut -d: -f6) || true
    [ -n "$home" ] || die "--user $user does not exist" 2
    [ -z "$path" ] || [ -n "$repo" ] || die "--path needs --repo" 2
    [[ ! $repo =~ ^https?://[^/]*@|://[^/@]*:[^/@]*@ ]] ||
        die "--repo contains a password or token. Use an ssh key, or git's credential helper" 2
    path=${path:-/opt/train}
    check_path --path "$path"
    check_hosts
    check_drives
}

check_path() {
    [[ $2 =~ ^(/[A-Za-z0-9._-]+)+$ ]] || die "$1 $2 is not allowed. Use an absolute path of letters, digits, dots, - and _" 2
}

check_hosts() {
    local entry name address seen=" "
    for entry in "${hosts[@]}"; do
        name=${entry%%=*} address=${entry#*=}
        # tools/launch/hosts.py applies the same rule to names in the hostfile.
        [[ $entry == *=* && $name =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]*$ ]] ||
            die "--host $entry has the wrong form. Use NAME=ADDRESS" 2
        is_address "$address" || die "--host $entry: $address is not an IP address" 2
        [[ $address != 127.* && $address != ::1 ]] ||
            die "--host $entry: other hosts can't reach a loopback address" 2
        [ "$name" != localhost ] || die "--host $entry: on each host, localhost means that host. Use another name" 2
        [[ $seen != *" $name "* ]] || die "--host $name is specified twice. Remove one of the two flags" 2
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
    [ -z "$nfs" ] || [ -z "$cifs" ] || die "--nfs and --cifs use the same --mount folder. Specify only one of the two flags" 2
    [ -n "$nfs$cifs" ] || [ -z "$mount" ] || die "--mount needs --nfs or --cifs" 2
    [ -n "$cifs" ] || [ -z "$cifs_credentials" ] || die "--cifs_credentials needs --cifs" 2
    [ -z "$cifs" ] || [ -n "$cifs_credentials" ] || die "--cifs needs --cifs_credentials FILE" 2
    [ -n "$s3_mount" ] || [ -z "$mount_s3$s3_credentials" ] ||
        die "--mount_s3 and --s3_credentials need --s3_mount" 2
    mount=${mount:-/mnt/shared} mount_s3=${mount_s3:-/mnt/s3}
    check_path --mount "$mount"
    check_path --mount_s3 "$mount_s3"
    [ "$mount" != "$mount_s3" ] || die "--mount and --mount_s3 are the same folder" 2
    [[ -z $nfs || $nfs =~ ^[A-Za-z0-9._-]+:/[^[:space:],]*$ ]] || die "--nfs $nfs has the wrong form. Use SERVER:/EXPORT" 2
    [[ -z $cifs || $cifs =~ ^//[A-Za-z0-9._-]+/[^[:space:],]+$ ]] || die "--cifs $cifs has the wrong form. Use //SERVER/SHARE" 2
    [[ -z $s3_mount || $s3_mount =~ ^[a-z0-9][a-z0-9.-]+(:/[^[:space:],]*)?$ ]] ||
        die "--s3_mount $s3_mount has the wrong form. Use BUCKET or BUCKET:/PATH" 2
    [ -z "$cifs_credentials" ] || check_path --cifs_credentials "$cifs_credentials"
    [ -z "$s3_credentials" ] || check_path --s3_credentials "$s3_credentials"
    check_secret --cifs_credentials "$cifs_credentials" '^[[:space:]]*username *=' "username=..."
    check_secret --s3_credentials "$s3_credentials" '^[^[:space:]]+:[^[:space:]]+$' "KEY:SECRET"
}

# Checks that only a secret file's owner can read it. Never prints the file's contents. A dry run prints a
# warning instead of ending with an error.
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
        echo "$flag $file does not exist"
        return
    fi
    mode=$(stat -L -c %a "$file")
    if [[ $mode != 600 && $mode != 400 ]]; then
        echo "$flag $file has mode $mode. Run chmod 600 $file"
    elif [ ! -r "$file" ]; then
        echo "$(id -un) can't read $flag $file"
    elif ! grep -Eq "$3" "$file"; then
        echo "$flag $file does not contain a line $4"
    fi
}

# --- Driver

check_driver() {
    local found query=("--query-gpu=name,driver_version" "--format=csv,noheader")
    if found=$(nvidia-smi "${query[@]}" 2>/dev/null) && [ -n "$found" ]; then
        found=$(sort <<<"$found" | uniq -c | sed 's/^ *\([0-9]*\) \(.*\), /\1 x \2, driver /')
        say "${found//$'\n'/; }"
    elif gpu_on_bus; then
        not_ready="this host has an NVIDIA GPU, but no working driver"
        warn "$not_ready, and this script installs none. On Ubuntu, run apt-get install ubuntu-drivers-common," \
            "then ubuntu-drivers install. On Debian, add non-free to the sources, and run apt-get install" \
            "linux-headers-amd64 nvidia-driver. Then reboot, and run this script again when nvidia-smi lists" \
            "the GPUs"
    else
        say "no NVIDIA GPU. This host can run rehearsals on the CPU"
    fi
}

# NVIDIA's PCI vendor number is 0x10de, and the class numbers of displays and 3D controllers start with 0x03.
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
        say "all packages are installed"
    elif change "install ${missing[*]}"; then
        until said=$(LC_ALL=C apt-get update -q 2>&1); do # apt-get update does not wait for apt's lock
            [[ $said == *"Could not get lock"* ]] && ((SECONDS < LOCK_S)) && sleep 5 && continue
            echo "$said" >&2
            die "apt-get update failed. See its output above"
        done
        DEBIAN_FRONTEND=noninteractive apt-get -o "DPkg::Lock::Timeout=$LOCK_S" install -qy \
            --no-install-recommends "${missing[@]}" || die "apt-get install failed. See its output above"
    fi
}

need() { there "$1" || missing+=("$1"); }

# Checks for a program instead of a Debian package, because the user may have installed it in a different way.
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
        warn "cloud-init overwrites /etc/hosts when this machine starts. Write 'manage_etc_hosts: false'" \
            "into /etc/cloud/cloud.cfg.d/99-train.cfg"
    fi
}

# Checks that both marker lines exist. If one marker were missing, lines after the block would be replaced as well.
whole_block() {
    local file
    file=$(or_empty /etc/hosts)
    [ "$(grep -cxF "$BEGIN" "$file")" = "$(grep -cxF "$END" "$file")" ] ||
        die "/etc/hosts has only one of the lines '$BEGIN' and '$END'. Remove this line"
}

# Prints the file with the block at its old position, or at the end. Removes Debian's line that maps the
# host's own name to a loopback address (127.0.1.1). torchrun's c10d backend and gloo look up this name, and
# pass the address to other hosts, which can't reach a loopback address.
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

# Warns about lines outside the block that also contain the name of one of its hosts.
named_twice() {
    local line
    while read -r line; do
        warn "/etc/hosts contains another line for a host of the block: $line"
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
                    warn "--host $entry is this host, but this host does not have this address. See ip -brief address"
                return 0 # write_hosts removes the loopback address of this name
            fi
        done
        warn "no --host has this host's name, $own"
    fi
    address=$(getent ahostsv4 "$own" | awk 'NR == 1 { print $1 }') || true
    [[ $address != 127.* ]] ||
        warn "this host's own name, $own, is $address here. torchrun's c10d and gloo would pass this address to" \
            "the other hosts, which can't reach this address. Pass --host $own=ADDRESS with the address of this host"
}

is_mine() { ! there iproute2 || [ -n "$(ip -oneline address show to "$1")" ]; }

or_empty() { if [ -e "$1" ]; then echo "$1"; else echo /dev/null; fi; }

# Replaces a file with $scratch/new, or overwrites a file that can't be replaced, for example in a container.
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

# Mounts a drive, and then adds a line for the drive to /etc/fstab. `shown` is the source that findmnt lists for the drive.
drive() {
    local source=$1 folder=$2 type=$3 options=$4 shown=$5 line other mounted said
    line="$source $folder $type $options 0 0"
    other=$(awk -v folder="$folder" '$1 !~ /^#/ && $2 == folder' "$(or_empty /etc/fstab)")
    [[ -z $other || $other == "$line" ]] || die "/etc/fstab mounts something else on $folder. Remove this line: $other"
    mounted=$(findmnt --noheadings --output SOURCE --mountpoint "$folder") || true
    [[ -z $mounted || $mounted == "$shown" ]] || die "$mounted is already mounted on $folder. Run umount $folder"
    if [ -n "$mounted" ]; then
        say "$source is mounted on $folder"
    elif change "mount $source on $folder"; then
        mkdir -p "$folder"
        said=$(timeout "$MOUNT_S" mount -t "$type" -o "$options" "$source" "$folder" 2>&1) ||
            die "mounting $source on $folder failed: $(one_line "${said:-no answer within $MOUNT_S s}")"
    fi
    { end_of_line_added /etc/fstab && { [ -n "$other" ] || echo "$line"; }; } >"$scratch/new"
    put /etc/fstab
}

# Prints a file with a newline at its end.
end_of_line_added() { awk 1 "$(or_empty "$1")"; }

# --- Repository

update_repository() {
    if [ -z "$repo" ]; then return; fi
    if [ ! -e "$path" ] || [ -z "$(ls -A "$path")" ]; then
        clone
    elif there git; then
        fast_forward
    else
        say "git must be installed before $path can be checked"
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
        die "$path is not a git repository that $user can use. Move it away"
    [ "$(in_repo remote get-url origin 2>/dev/null)" = "$repo" ] ||
        die "$path is not a clone of --repo. See git -C $path remote -v"
    changed=$(in_repo status --porcelain --untracked-files=no | awk 'NR <= 3 { print $2 }' | paste -sd ' ')
    [ -z "$changed" ] || die "$path has local changes ($changed). Push or stash them"
    branch=$(in_repo symbolic-ref --short --quiet HEAD) ||
        die "$path is not on a branch. Run git -C $path switch BRANCH"
    must in_repo ls-remote --exit-code origin "refs/heads/$branch"
    newest=$(awk -v ref="refs/heads/$branch" '$2 == ref { print $1 }' <<<"$said") # ssh may print other lines
    here=$(in_repo rev-parse HEAD)
    if [ "$here" = "$newest" ]; then
        say "$path is at ${here:0:10} of $branch"
    elif in_repo merge-base --is-ancestor "$newest" HEAD 2>/dev/null; then
        die "$path has commits that --repo lacks. Push them"
    elif change "update $path from ${here:0:10} to ${newest:0:10} of $branch"; then
        must in_repo fetch --quiet origin "$branch"
        in_repo merge-base --is-ancestor HEAD FETCH_HEAD ||
            die "$path and --repo have diverged. Rebase and push"
        must in_repo merge --quiet --ff-only FETCH_HEAD
    fi
}

make_setup() {
    if [ -d "$path" ] && there make && as_user make --silent --question -C "$path" setup >/dev/null 2>&1; then
        say "make setup has nothing to do"
    elif change "run make setup in $path"; then
        as_user make --no-print-directory -C "$path" setup || die "make setup in $path failed. See its output above"
    fi
}

in_repo() { as_user git -C "$path" "$@"; }

# Runs a command as the user who trains, with this user's SSH keys. Git neither asks questions nor writes the
# index.
as_user() {
    local settings=(GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0 GIT_SSH_COMMAND="ssh -o BatchMode=yes")
    if [ "$user" = "$(id -un)" ]; then
        env "${settings[@]}" "$@"
    else
        runuser -u "$user" -- env "HOME=$home" "${settings[@]}" "$@"
    fi
}

# Runs a command and stores its output in $said. If the command fails, its output is the script's error
# message.
must() {
    said=$("$@" 2>&1) || die "$(one_line "$said") (${*:2:4} ...)"
}

# Prints the error messages of ssh and git in one line. Prints the output's last line if there are no
# messages.
one_line() {
    local reasons
    reasons=$(grep -E '^(fatal|error): |verification failed|denied' <<<"$1" | paste -sd ' ') || true
    if [ -n "$reasons" ]; then echo "$reasons"; else tail -n 1 <<<"$1"; fi
}

main "$@"
