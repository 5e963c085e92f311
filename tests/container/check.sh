#!/usr/bin/env bash
# Builds the Dockerfile and tries what README.md promises of the container, on a machine without a Docker engine.
#
#   sudo tests/container/check.sh           # on a base image made here of Debian 12, with debootstrap
#   sudo BASE=python:3.11-slim-bookworm tests/container/check.sh    # on an image from a registry
#   sudo BASE=docker-daemon:python:3.11-slim-bookworm tests/container/check.sh    # or from the Docker engine
#   sudo tests/container/check.sh --keep    # leave the image, and say how to look into it
#
# The course is installed with the settings of this host's pip (index, folders of wheels, certificate); no engine and
# no cgroup is needed, so a --gpus of Docker is the one promise that is not tried. Other settings: PIP_ARGS as in the
# Dockerfile, STORAGE_DRIVER=vfs where overlay does not work although it can be mounted, MIRROR is a Debian mirror,
# TMPDIR a folder with 10 GB free (40 GB if pip takes the CUDA build of torch). About 8 minutes on 2 cores.
# Exit code: 0 all passed, 1 something failed, 2 bad input or a need is missing, 130 interrupted.
set -euo pipefail
shopt -s inherit_errexit

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
IMAGE=localhost/gpu-training-course
ADDRESS=192.0.2.1 # for documentation, RFC 5737: belongs to no machine
QUICK=(record check cli container repository hardware_probe preflight nvml peaks)

fail() {
    echo "check.sh: $1" >&2
    exit 2
}

need() { # command, Debian package
    command -v "$1" > /dev/null || fail "$1 is missing: apt-get install $2"
}

check_needs() {
    [ "$(uname)" = Linux ] || fail "this needs Linux; elsewhere, build the Dockerfile with Docker itself"
    [ "$(id -u)" = 0 ] || fail "this needs root, to mount and to make users: sudo $0"
    need buildah buildah
    [ -n "${BASE:-}" ] || need debootstrap debootstrap
    need unshare util-linux
    need setpriv util-linux
    need pkill procps
    need ip iproute2
    need python3 python3
    unshare --mount --pid --net --fork true 2> /dev/null ||
        fail "namespaces are not allowed here: in a container, start it with --privileged"
    local free_gb
    free_gb=$(($(df --output=avail --block-size=1G "${TMPDIR:-/var/tmp}" | tail -1)))
    [ "$free_gb" -ge 10 ] || fail "${TMPDIR:-/var/tmp} has $free_gb GB free, 10 are needed: TMPDIR=/other/folder"
}

# -- outside: everything below runs in namespaces of its own, so that its end, however it comes, ends every process
# -- and every mount; this shell only removes the folder.

outside() {
    local work inner status=0
    work=$(mktemp -d "${TMPDIR:-/var/tmp}/course-container.XXXXXX")
    inner=
    # shellcheck disable=SC2317,SC2329  # called by the trap
    clean_up() {
        [ -z "$inner" ] || pkill -KILL -P "$inner" || true # its child is the first process of the namespace
        wait || true
        [ -e "$work/keep" ] || rm -rf --one-file-system "$work"
    }
    trap clean_up EXIT
    trap 'echo "check.sh: interrupted" >&2; exit 130' INT TERM HUP
    # unshare itself complains when its child is killed; what the child says goes past it, by descriptor 3.
    setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child=KILL --mount-proc \
        "$HERE/check.sh" --inside "$work" "$@" < /dev/null 3>&2 2> /dev/null &
    inner=$!
    wait "$inner" || status=$?
    exit "$status"
}

# -- inside

# A function in a condition, as in `step ... || true`, would go on after a command that fails, in spite of `set -e`:
# hence the subshell in the background, and FAILED in place of an exit code.
step() { # title, command...: runs it, keeps its output, notes the time
    local title=$1 start=$SECONDS status=0
    shift
    ("$@") > "$WORK/log" 2>&1 &
    wait $! || status=$?
    printf '%-6s %4d s  %s\n' "$([ $status = 0 ] && echo ok || echo FAILED)" $((SECONDS - start)) "$title"
    if [ $status != 0 ]; then
        tail -n 40 "$WORK/log" | sed 's/^/    /'
        FAILED=$((FAILED + 1))
    fi
}

storage_driver() { # overlay if it can be mounted here (not in most containers); vfs copies every layer, and is slow
    mkdir "$WORK/try" "$WORK/try"/{lower,upper,work,merged}
    local options="lowerdir=$WORK/try/lower,upperdir=$WORK/try/upper,workdir=$WORK/try/work"
    if mount -t overlay -o "$options" overlay "$WORK/try/merged" 2> /dev/null; then echo overlay; else echo vfs; fi
}

store() {
    "${STORE[@]}" "$@"
}

base_image() { # writes the image's id to $WORK/base
    if [ -n "${BASE:-}" ]; then
        store pull --quiet "$BASE" > "$WORK/base"
        return
    fi
    # As python:3.11-slim: Python with its venv module and certificates; make, because a test of the Makefile needs it.
    debootstrap --variant=minbase --include=python3,python3-venv,make,ca-certificates bookworm \
        "$WORK/debian" ${MIRROR:+"$MIRROR"}
    rm -f "$WORK/debian"/var/cache/apt/archives/*.deb
    local container
    container=$(store from scratch)
    store add --quiet "$container" "$WORK/debian" /
    store commit --quiet --rm "$container" > "$WORK/base"
    rm -rf --one-file-system "$WORK/debian"
}

build() {
    local volumes=() mount
    python3 "$HERE/host_pip.py" "$WORK/pip.conf" > "$WORK/mounts"
    [ ! -e "$WORK/pip.conf" ] || echo "$WORK/pip.conf:/etc/pip.conf" >> "$WORK/mounts"
    while read -r mount; do volumes+=(--volume "$mount:ro"); done < "$WORK/mounts"
    store bud --isolation chroot --pull-never --build-arg BASE="$(cat "$WORK/base")" \
        --build-arg PIP_ARGS="${PIP_ARGS:-}" --build-arg EXTRAS=course,test ${volumes[@]+"${volumes[@]}"} --tag "$IMAGE" "$ROOT"
    rm -f "$WORK/pip.conf"
}

# Runs a command in the image as Docker would: its user, its folder, processes of its own, a /dev/shm of the given
# size. There is no network but the container's own, which proves that nothing is downloaded after the build.
inside() { # size of /dev/shm, options of `buildah run` --, command...
    local shm=$1 options=()
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    # shellcheck disable=SC2016  # expanded by the inner shell
    unshare --mount --pid --net --fork --kill-child=KILL --mount-proc bash -euc '
        ip link set lo up
        ip address add "$1/32" dev lo
        mount -t tmpfs -o "size=$2" tmpfs /dev/shm
        exec "${@:3}"' bash "$ADDRESS" "$shm" \
        "${STORE[@]}" run --isolation chroot ${options[@]+"${options[@]}"} "$CONTAINER" -- "$@"
}

user_is_learner() {
    inside 2g -- id
    [ "$(inside 2g -- id -u)" = 1000 ]
    # shellcheck disable=SC2016  # expanded in the container
    inside 2g -- sh -c 'test "$(find ~ ! -user learner | tee /dev/stderr | wc -l)" = 0'
    inside 2g -- sh -c 'command -v python && python -c "import labs; print(labs.__file__)"'
}

nothing_of_pip_stays() { # the mounted paths are empty in the image
    local root path
    root=$(store mount "$CONTAINER")
    while IFS=: read -r _ path; do
        if [ -d "$root$path" ]; then [ -z "$(ls -A "$root$path")" ]; else [ ! -s "$root$path" ]; fi ||
            { echo "$path holds something"; return 1; }
    done < "$WORK/mounts"
    store umount "$CONTAINER"
    ! store inspect "$IMAGE" | grep -F -e index-url -e find-links
}

tests_pass() {
    local deselect=() files=("${QUICK[@]/#/tests\/test_}")
    inside 2g -- sh -c 'command -v make' || deselect=(-k "not test_make_")
    inside 2g -- python -m ruff check .
    inside 2g -- python -m ruff format --check .
    inside 2g -- python -m pytest -q -p no:cacheprovider "${files[@]/%/.py}" ${deselect[@]+"${deselect[@]}"}
}

preflight_passes() {
    inside 2g -- python -m labs.hardware_probe --smoke | tee "$WORK/preflight"
    grep -q '^ok    /dev/shm' "$WORK/preflight"
}

preflight_warns_of_small_shm() { # Docker's default is 64 MB
    inside 64m -- python -m labs.hardware_probe --smoke | tee "$WORK/preflight"
    grep -A1 '^WARN  /dev/shm' "$WORK/preflight" | grep -- '-> .*--shm-size'
}

lab_with_token() { # nothing, or the option that gives a token
    local command
    mapfile -t command < <(store inspect --type image --format '{{range .OCIv1.Config.Cmd}}{{println .}}{{end}}' "$IMAGE" | grep .)
    inside 2g "$@" -- python tests/container/lab.py "$ADDRESS" "${command[@]}"
}

copies_and_records_in_a_mounted_folder() {
    mkdir "$WORK/mine" "$WORK/not-mine"
    chown 1000:1000 "$WORK/mine"
    local volume=/home/learner/course/my save=(python -m labs.data_parallel --smoke --nproc 1 --out my/run.jsonl)
    inside 2g --volume "$WORK/mine:$volume" -- python -m labs.kit.copies
    inside 2g --volume "$WORK/mine:$volume" -- "${save[@]}"
    [ "$(stat -c %u:%g "$WORK/mine/run.jsonl")" = 1000:1000 ]
    [ "$(stat -c %u:%g "$WORK/mine/00_gpu_checks.ipynb")" = 1000:1000 ]
    inside 2g --volume "$WORK/not-mine:$volume" -- "${save[@]}" > "$WORK/refused" 2>&1 && return 1
    grep 'cannot write to' "$WORK/refused"
    inside 2g --volume "$WORK/not-mine:$volume" -- python -m labs.start > "$WORK/refused" 2>&1 && return 1
    grep 'cannot write in .*it belongs to user 0, you are user 1000' "$WORK/refused"
}

main_inside() {
    WORK=$1 FAILED=0
    export TMPDIR=$WORK/tmp # buildah's own temporary files
    mkdir "$TMPDIR"
    STORE=(buildah --storage-driver "${STORAGE_DRIVER:-$(storage_driver)}" --root "$WORK/storage" --runroot "$WORK/run")
    step "base image: ${BASE:-Debian 12 by debootstrap}" base_image
    [ $FAILED = 0 ] || exit 1
    step "build the Dockerfile" build
    [ $FAILED = 0 ] || exit 1
    CONTAINER=$(store from --pull-never "$IMAGE")
    echo "       image: $(store images --format '{{.Size}}' "$IMAGE")"
    step "user 1000 owns all of the home folder, python is the course's" user_is_learner
    step "nothing of this host's pip settings stays in the image" nothing_of_pip_stays
    step "preflight is ready with --shm-size=2g" preflight_passes
    step "preflight warns of a /dev/shm of 64 MB, and names --shm-size" preflight_warns_of_small_shm
    step "JupyterLab as started by the image: only with its token" lab_with_token
    step "JupyterLab with -e JUPYTER_TOKEN=...: only with that" lab_with_token --env JUPYTER_TOKEN=a-token-of-mine
    step "copies and records in a mounted folder belong to user 1000" copies_and_records_in_a_mounted_folder
    step "a notebook: python -m labs.kit.course 00_gpu_checks" inside 2g -- python -m labs.kit.course 00_gpu_checks
    step "ruff, and the quick part of the tests" tests_pass
    echo "$FAILED failed"
    [ "$FAILED" = 0 ]
}

# shellcheck disable=SC2317,SC2329  # called by the trap
keep_it() {
    touch "$1/keep"
    echo "kept in $1. Look into it:"
    echo "  store='${STORE[*]}'"
    echo "  \$store run --isolation chroot \$(\$store from --pull-never $IMAGE) -- bash"
    echo "  rm -rf $1    # when done"
}

if [ "${1:-}" = --inside ]; then
    exec 2>&3 3>&-
    [ "${3:-}" != --keep ] || trap 'keep_it "$WORK"' EXIT
    main_inside "$2"
    exit
fi
case "$*" in
    "" | --keep)
        check_needs
        outside "$@"
        ;;
    -h | --help) sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p}' "$0" ;;
    *) fail "unknown option $*: there is --keep" ;;
esac
