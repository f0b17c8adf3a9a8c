#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# systems.sh - README's two commands, tools/quickstart.sh and tools/test.sh, on each system that it names: in a folder
# with nothing but debootstrap's minimal Debian and a clean clone of the last commit. It takes about ten minutes a
# system on two cores. Needs root, debootstrap and a mirror of Debian. Each folder has mounts and processes of its own,
# which end with this script, however it ends. The last lines are a summary. Exit: 0 all well, 1 something failed, 77
# this machine cannot do it.
#
#   tools/systems.sh                      bookworm, trixie and trixie+newest: Debian 12 and 13 with their own Meson
#                                         (that of Debian 12 is the oldest that works), Debian 13 with pip's newest
#   tools/systems.sh --system trixie      one; repeat for more. bookworm+newest, trixie+1.0.1: with pip's Meson
#   tools/systems.sh --keep DIR           keeps what was downloaded, the folders and what the commands printed in DIR
#   tools/systems.sh --keep DIR --enter trixie    a shell in a folder that was kept
#   tools/systems.sh --suite python       tools/test.sh --suite python; repeat for more
#   tools/systems.sh --mirror URL         where packages come from; the default is apt's, if it is one of Debian
#
# Before a release, and in a few minutes after a change of a script:
#
#   tools/systems.sh --keep /var/tmp/systems --system trixie --suite api --suite core
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

keep='' enter='' mirror='' system=() suite=()
read_options keep=folder enter=system mirror=URL 'system[]=name; --help lists them' 'suite[]=name' -- "$@"
[ ${#system[@]} != 0 ] || system=(bookworm trixie trixie+newest)
for name in "${system[@]}"; do
    [[ $name =~ ^(bookworm|trixie)(\+(newest|[0-9.]+))?$ ]] || die "no system \"$name\"; --help lists them"
done

skip() {
    say "skipped: $1"
    exit 77
}

[ "$(id -u)" = 0 ] || skip "only root may make such folders: sudo tools/systems.sh"
unshare --mount --pid --fork true 2>/dev/null || skip "mounts of its own are not allowed here"

# What runs in a folder has mounts and process numbers of its own, which end with it.
running=''
stop() {
    [ -z "$running" ] || { kill -KILL -- "-$running" && wait "$running"; } 2>/dev/null || true
    [ -n "$keep" ] || rm -rf --one-file-system "$work"
}
# in_folder AT COMMAND... - mounts and environment; archives is where apt keeps packages
in_folder() {
    # shellcheck disable=SC2016 # it is that bash that expands it
    exec unshare --mount --pid --fork --kill-child bash -euc 'at=$1 && shift
        mount -t proc proc "$at/proc"
        mount --rbind /sys "$at/sys"
        mount --rbind /dev "$at/dev"
        mount -t tmpfs tmpfs "$at/dev/shm"
        mount --bind "$0" "$at/var/cache/apt/archives"
        exec chroot "$at" "$@"' "$archives" "$1" env -i HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin ${http_proxy:+http_proxy="$http_proxy"} \
        ${https_proxy:+https_proxy="$https_proxy"} ${no_proxy:+no_proxy="$no_proxy"} "${@:2}"
}

# shown PREFIX - of what a command prints: what it says, and how far the tests are, twice a minute
shown() {
    local line last=$SECONDS
    while IFS= read -r line; do
        if [[ $line = "== "* || $line =~ ^[0-9]+" passed, " ]]; then
            printf '%s %s\n' "$1" "$line"
        elif [[ $line =~ ^\ *[0-9]+/[0-9]+\  ]] && ((SECONDS - last >= 30)); then
            last=$SECONDS
            printf '%s %s\n' "$1" "${line%% *}"
        fi
    done
}

# watched NAME LOG FUNCTION... - runs it, and has its status
watched() {
    local log=$2 rc=0
    : >"$log"
    set -m # a process group of its own
    ("${@:3}") </dev/null >"$log" 2>&1 &
    running=$!
    set +m
    tail -n +1 -f --pid="$running" "$log" 2>/dev/null | shown "$1" &
    wait "$running" || rc=$? # which a signal ends, unlike a command
    running=''
    wait || true
    [ $rc = 0 ] || {
        say "failed: the end of what $1 printed${keep:+ in $log}"
        tail -n 40 "$log"
    }
    return $rc
}

if [ -n "$keep" ]; then
    mkdir -p "$keep"
    work=$(cd "$keep" && pwd)
else
    work=$(mktemp -d -p /var/tmp systems.XXXXXX)
fi
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if [ -n "$enter" ]; then
    [ -n "$keep" ] && [ -d "$work/$enter/root/colobridge" ] || die "--enter $enter: no such folder was kept in ${keep:---keep DIR}"
    archives=$work/archives-${enter%+*}
    (in_folder "$work/$enter" bash -c 'cd /root/colobridge && exec bash')
    exit
fi

has debootstrap || apt_install "debootstrap debian-archive-keyring" '' || skip "there is no debootstrap"
has git || apt_install git '' || skip "there is no git"
[ -n "$mirror" ] || mirror=$(LC_ALL=C apt-get indextargets --format '$(ORIGIN) $(CODENAME) $(REPO_URI)' 2>/dev/null |
    sed -n 's/^Debian [a-z]* //p' | head -n 1) || true
[ -z "$(git status --porcelain --untracked-files=no)" ] ||
    say "the last commit is what is tested; what has changed since then is not in it"

# meson_from_pip AT VERSION - another Meson than the system's
meson_from_pip() {
    local python
    python=$(python_with pip) || die "there is no pip"
    rm -rf "$work/meson"
    [ "$2" != newest ] || set -- "$1" ''
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work/meson" "meson${2:+==$2}"
    "$python" -m zipfile -e "$work"/meson/*.whl "$1/opt/meson"
    printf '#!/usr/bin/env python3\nimport sys\nsys.path.insert(0, "/opt/meson")\nfrom mesonbuild.mesonmain import main\n%s\n' \
        'sys.exit(main())' >"$1/usr/local/bin/meson"
    chmod +x "$1/usr/local/bin/meson"
}

# prepare NAME - the folder, with nothing in it but the minimum and a clone
prepare() {
    local at=$work/$1 release=${1%+*}
    rm -rf --one-file-system "$at"
    unshare --mount --pid --fork --kill-child --mount-proc debootstrap --variant=minbase --cache-dir="$archives" "$release" "$at" ${mirror:+"$mirror"}
    cp /etc/resolv.conf "$at/etc/resolv.conf"
    apt-config dump Acquire 2>/dev/null | grep -i '::proxy' >"$at/etc/apt/apt.conf.d/99proxy" || true
    [ "$release" = "$1" ] || meson_from_pip "$at" "${1#*+}"
    git clone --quiet --depth 1 "file://$root" "$at/root/colobridge"
}

table=() failed=no options=()
for name in "${suite[@]}"; do
    options+=(--suite "$name")
done
for name in "${system[@]}"; do
    say "$name"
    since=$SECONDS quickstart=failed tests='not run' meson=''
    archives=$work/archives-${name%+*} at=$work/$name log=$work/$name
    mkdir -p "$archives"
    if watched "$name" "$log.folder.log" prepare "$name"; then
        ! watched "$name" "$log.quickstart.log" in_folder "$at" bash -c 'cd /root/colobridge && exec tools/quickstart.sh' ||
            quickstart=passed
        # shellcheck disable=SC2016 # it is that bash that expands it
        watched "$name" "$log.test.log" in_folder "$at" bash -c 'cd /root/colobridge && exec tools/test.sh "$@"' bash \
            "${options[@]}" || failed=yes
        tests=$(tail -n 1 "$log.test.log")
        meson=$( (in_folder "$at" meson --version) 2>/dev/null || true)
    fi
    [ "$quickstart" = passed ] || failed=yes
    table+=("$(printf '%-15s Meson %-7s  quickstart.sh %s  test.sh %s  %d:%02d' "$name" "${meson:-?}" "$quickstart" "$tests" \
        $(((SECONDS - since) / 60)) $(((SECONDS - since) % 60)))")
    [ -n "$keep" ] || rm -rf --one-file-system "$at"
done
say "summary"
printf '%s\n' "${table[@]}"
[ "$failed" = no ]
