# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# setup.sh - what the scripts of this folder share (sourced, not run): say what happens, install what
# is missing, configure and build. Leaves the machine alone when nothing is missing.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 2

if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
    bold=$'\033[1m' plain=$'\033[0m'
else
    bold='' plain=''
fi
jobs=$(nproc 2>/dev/null || echo 2)
SECONDS=0

say() {
    printf '%s== [%d:%02d] %s%s\n' "$bold" $((SECONDS / 60)) $((SECONDS % 60)) "$*" "$plain"
}

die() {
    printf '%s\n' "$*" >&2
    exit 2
}

# Prints what stands at the head of the script that runs.
usage() {
    sed -n '3,/^set /s/^# \{0,1\}//p' "$root/tools/$(basename "$0")"
}

# read_options SPECS... -- ARGS... - an option sets the variable of its name, with _ for -: "keep" to yes, "seconds=number" to what
# follows; "ranks[]=value" adds that to a list. What stands behind = is said if it is missing. What is no option is
# added to the list words, if "words" is a spec.
read_options() {
    local spec specs=() name wants
    while [ "$1" != -- ]; do
        specs+=("$1")
        shift
    done
    while shift && [ $# -gt 0 ]; do
        [ "$1" != --help ] || { usage && exit 0; }
        if [[ $1 != -* && " ${specs[*]} " = *" words "* ]]; then
            words+=("$1")
            continue
        fi
        name=${1#--} spec=''
        for wants in "${specs[@]}"; do
            [[ $1 != "--${wants%%[=[]*}" || $wants = words ]] || spec=$wants
        done
        [ -n "$spec" ] || die "unknown option \"$1\"; --help lists them"
        if [ "$spec" = "$name" ]; then
            printf -v "${name//-/_}" yes
            continue
        fi
        wants=${spec#*=}
        [ $# -ge 2 ] && [[ $wants != number || $2 =~ ^[0-9]+$ ]] || die "$1 wants a $wants"
        if [[ $spec = *"[]="* ]]; then
            local -n list=${name//-/_}
            list+=("$2")
        else
            printf -v "${name//-/_}" %s "$2"
        fi
        shift
    done
}

has() {
    command -v "$1" >/dev/null 2>&1
}

# Does a C program that includes $1 compile? For what comes without a pkg-config file.
has_header() {
    printf '#include <%s>\nint main(void) { return 0; }\n' "$1" |
        ${CC:-cc} -x c -fsyntax-only - 2>/dev/null
}

# Prints the Debian and Ubuntu packages that are missing; $1 is "run" or "test".
missing_packages() {
    { has "${CC:-cc}" || has gcc; } || echo gcc
    { has "${CC:-cc}" && has_header stdio.h; } || echo libc6-dev
    has meson || echo meson
    has ninja || echo ninja-build
    has python3 || echo python3
    if has pkg-config; then
        pkg-config --exists jansson || echo libjansson-dev
        pkg-config --exists openblas || pkg-config --exists cblas || echo libopenblas-dev
        [ "$1" = run ] || pkg-config --exists 'cmocka >= 1.1.5' || echo libcmocka-dev
    else
        echo pkg-config libjansson-dev libopenblas-dev
        [ "$1" = run ] || echo libcmocka-dev
    fi
    [ "$1" = run ] || has "${CXX:-c++}" || echo g++
}

# Prints the first Python here that has all of these modules. The tests look at the same ones (python/tests/run.py).
python_with() {
    local python
    for python in ${COLO_PYTHON:-} python3 /usr/bin/python3; do
        "$python" -c 'import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "$@" 2>/dev/null &&
            echo "$python" && return 0
    done
    return 1
}

python_has() {
    python_with "$@" >/dev/null
}

# Packages of those of the modules that no Python has; of all when none has all.
python_packages() {
    local module lacking=()
    python_has "$@" && return 0
    for module in "$@"; do
        python_has "$module" || lacking+=("python3-$module")
    done
    [ ${#lacking[@]} != 0 ] || lacking=("${@/#/python3-}")
    echo "${lacking[@]}"
}

# The same for what is used where it is there: placement, MPI, UCX, and what only some tests need.
optional_packages() {
    { has pkg-config && pkg-config --exists 'hwloc >= 2.9'; } || echo libhwloc-dev
    has mpicc || echo libopenmpi-dev
    has mpirun || echo openmpi-bin
    { has pkg-config && pkg-config --exists 'ucx >= 1.13'; } || echo libucx-dev
    [ "$1" = run ] && return 0
    has abidiff || echo abigail-tools
    has ip || echo iproute2
    { has clang && has clang++; } || echo clang
    has_header dlpack/dlpack.h || echo libdlpack-dev
    python_packages pytest torch numpy
    python_has ensurepip || echo python3-venv
}

one_line() {
    tr '\n' ' ' | sed 's/ *$//'
}

# Those of the packages that apt can install: Ubuntu 24.04 has no python3-torch, say.
known_to_apt() {
    local package
    for package in "$@"; do
        LC_ALL=C apt-cache policy "$package" 2>/dev/null | grep 'Candidate: [^(]' >/dev/null &&
            echo "$package"
    done
    return 0
}

# apt_install NEEDED WANTED - lists of packages; says why when it cannot; never asks.
apt_install() {
    local as_root=() needed=$1 wanted=$2
    has apt-get || {
        echo "There is no apt-get here: install it by this system's means, then run this again."
        return 1
    }
    if [ "$(id -u)" != 0 ]; then
        has sudo || return 1
        as_root=(sudo)
        # No terminal to type a password on: fail instead of waiting.
        if [ ! -t 0 ] || [ -n "${CI:-}" ]; then
            as_root=(sudo -n)
        fi
    fi
    say "installing what is missing: ${needed:+$needed }$wanted"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q update </dev/null || return 1
    # shellcheck disable=SC2086 # a list of names
    wanted=$(known_to_apt $wanted | one_line)
    [ -n "$needed$wanted" ] || return 0
    # shellcheck disable=SC2086 # lists of names
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q install -y \
        --no-install-recommends $needed $wanted </dev/null
}

# What was still missing after apt had done all it can: with the lists that it had then, asking again
# brings nothing. Newer lists, or a build folder made anew, and it is asked.
in_vain=build/apt-in-vain
apt_lists=/var/lib/apt/lists

# Those of the packages that apt has not yet failed to bring.
worth_asking() {
    if [ -f "$in_vain" ] && [ ! "$apt_lists" -nt "$in_vain" ]; then
        printf '%s\n' "$@" | grep -vxFf "$in_vain" || true
    else
        printf '%s\n' "$@"
    fi
}

install_missing() {
    local needed wanted asked=no
    needed=$(missing_packages "$1" | one_line)
    wanted=$(optional_packages "$1" | one_line)
    [ -n "$needed$wanted" ] || return 0
    # shellcheck disable=SC2086 # a list of names
    if [ -n "$needed" ] || [ -n "$(worth_asking $wanted)" ]; then
        ! apt_install "$needed" "$wanted" || asked=yes
    fi
    needed=$(missing_packages "$1" | one_line)
    wanted=$(optional_packages "$1" | one_line)
    if [ "$asked" = yes ]; then
        mkdir -p "$(dirname "$in_vain")"
        # shellcheck disable=SC2086 # a list of names
        printf '%s\n' $wanted >"$in_vain"
    fi
    [ -z "$needed" ] || die "missing: $needed (Debian and Ubuntu call it so). As root:
    apt-get update && apt-get install --no-install-recommends $needed
and for what is used where it is there: $wanted"
    [ -z "$wanted" ] || say "without $wanted: what needs it is left out or skipped"
}

# configure DIR MESON-OPTIONS... - sets up the folder or brings it in line with the options.
configure() {
    local dir=$1 log=$1.configure.log again=()
    shift
    say "configuring $dir"
    mkdir -p "$dir"
    if [ -f "$dir/build.ninja" ]; then
        [ "${CC:-cc}" = "$(cat "$dir/compiler" 2>/dev/null || echo cc)" ] &&
            meson setup --reconfigure "$dir" "$@" >"$dir/configure.log" 2>&1 && return 0
        # Made by another Meson, by another compiler or with one that is gone: a build folder holds nothing else.
        again=(--wipe)
    fi
    meson setup "${again[@]}" "$dir" "$@" >"$log" 2>&1 || {
        cat "$log"
        die "could not configure $dir"
    }
    mv "$log" "$dir/configure.log"
    echo "${CC:-cc}" >"$dir/compiler"
}

# Without a name, Meson 1.7 to 1.9 build what all tests need, not what those need that run. This names all of them.
# shellcheck disable=SC2034 # scripts use it
every_test=colobridge:

# linked DIR FOLDERS... - what is linked from the sources in these folders: targets for build
linked() {
    local dir=$1 folder
    shift
    for folder in "$@"; do
        ninja -C "$dir" -t targets all | sed -n "s,^\($folder/[^:]*\): .*_LINKER.*,\1,p"
    done
}

# life_signs DIR - of ninja's lines on stdin: how far it is, when that was not said for a while
life_signs() {
    local line last=$SECONDS
    while IFS= read -r line; do
        if [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]] && ((SECONDS - last >= 10)); then
            last=$SECONDS
            say "building $1: ${BASH_REMATCH[1]} of ${BASH_REMATCH[2]}"
        fi
    done
}

# programs_of_tests DIR - those of tests and benchmarks, which "all" leaves out: targets for build. The
# mutants in GPU code take minutes of nvcc; `meson test` builds those that it runs.
programs_of_tests() {
    linked "$1" tests bench | grep -v '^tests/gpu/\(libmutant-\|gpu-mutants\)'
}

# build DIR TARGETS... - builds what ninja builds by default, or these; quiet unless it fails or
# somebody watches; status 2 when it fails.
build() {
    local dir=$1
    shift
    say "building $dir"
    if [ -t 1 ]; then
        ninja -C "$dir" -j "$jobs" "$@" 2>&1 | tee "$dir/build.log" && return 0
    elif ninja -C "$dir" -j "$jobs" "$@" 2>&1 | tee "$dir/build.log" | life_signs "$dir"; then
        ! grep -A 6 'warning:' "$dir/build.log" || true
        return 0
    else
        tail -n 60 "$dir/build.log"
    fi
    echo "could not build $dir" >&2
    return 2
}
