# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# setup.sh - what quickstart.sh and test.sh share (sourced, not run): say what happens, install what
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

install_missing() {
    local packages as_root=()
    packages=$(missing_packages "$1" | tr '\n' ' ')
    packages=${packages% }
    if [ -z "$packages" ]; then
        return 0
    fi
    has apt-get || die "missing: $packages (names of Debian 12 and Ubuntu 24.04 packages).
There is no apt-get here: install them by this system's means, then run this again."
    if [ "$(id -u)" != 0 ]; then
        has sudo || die "missing, and neither root nor sudo to install it. As root:
    apt-get update && apt-get install --no-install-recommends $packages"
        as_root=(sudo)
        # Nobody to type a password: fail with the sentence below instead of waiting.
        if [ ! -t 0 ] || [ -n "${CI:-}" ]; then
            as_root=(sudo -n)
        fi
    fi
    say "installing what is missing: $packages"
    # shellcheck disable=SC2086 # a list of names
    if ! { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q update &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q install -y \
            --no-install-recommends $packages; } </dev/null; then
        die "could not install: $packages. As root:
    apt-get update && apt-get install --no-install-recommends $packages"
    fi
    packages=$(missing_packages "$1" | tr '\n' ' ')
    [ -z "$packages" ] || die "still missing after installing: $packages"
}

# configure DIR MESON-OPTIONS... - sets up the folder or brings it in line with the options.
configure() {
    local dir=$1
    shift
    say "configuring $dir"
    mkdir -p "$dir"
    if [ -f "$dir/build.ninja" ]; then
        meson setup --reconfigure "$dir" "$@" >"$dir/configure.log" 2>&1 && return 0
        # Made by another Meson or with a compiler that is gone: a build folder holds nothing else.
        meson setup --wipe "$dir" "$@" >"$dir.configure.log" 2>&1 || {
            cat "$dir.configure.log"
            die "could not configure $dir"
        }
        mv "$dir.configure.log" "$dir/configure.log"
        return 0
    fi
    meson setup "$dir" "$@" >"$dir/configure.log" 2>&1 || {
        cat "$dir/configure.log"
        die "could not configure $dir"
    }
}

# build DIR TARGETS... - builds, quiet unless it fails or somebody watches.
build() {
    local dir=$1
    shift
    say "building $dir"
    if [ -t 1 ]; then
        ninja -C "$dir" -j "$jobs" "$@" || die "could not build $dir"
    else
        ninja -C "$dir" -j "$jobs" "$@" >"$dir/build.log" 2>&1 || {
            tail -n 60 "$dir/build.log"
            die "could not build $dir"
        }
        ! grep -A 6 'warning:' "$dir/build.log" || true
    fi
}
