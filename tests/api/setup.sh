#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# setup.sh - tools/setup.sh asks apt for what is missing, and not again for what apt has not got. Here
# apt is a function that brings "jansson" and has never heard of "torch".
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../tools/setup.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
in_vain=$work/build/apt-in-vain apt_lists=$work/lists
mkdir "$apt_lists"
touch -d '1 hour ago' "$apt_lists"

missing_packages() {
    [ ! -f "$work/no-compiler" ] || echo gcc
}
optional_packages() {
    [ -f "$work/jansson" ] || echo jansson
    echo torch # as python_packages does: several on a line
    [ "$1" = run ] || echo "numpy torch"
}
apt_install() {
    echo "$1:$2" >>"$work/asked"
    [ ! -f "$work/no-network" ] || return 1
    touch "$work/jansson"
    rm -f "$work/no-compiler"
}

case_no=0
# expect TIMES run|test WHAT - after another call of install_missing apt has been asked so often
expect() {
    local times=$1 out
    case_no=$((case_no + 1))
    out=$(install_missing "$2")
    [ "$(wc -l <"$work/asked")" = "$times" ] ||
        die "case $case_no, $3: apt was asked $(wc -l <"$work/asked") times, expected $times"
    [[ $out == *"without"*"torch"* ]] || die "case $case_no, $3: nothing says what is left out: $out"
}

touch "$work/no-network"
expect 1 run "a fresh machine"
expect 2 run "apt failed: it is asked again"
rm "$work/no-network"
expect 3 run "the network is back"
expect 3 run "nothing is new"
expect 4 test "more is wanted"
expect 4 test "nothing is new"
expect 4 run "and less of it"
touch "$work/no-compiler"
expect 5 test "what must be there is asked for in any case"
rm "$work/jansson"
expect 6 test "something went away"
touch -d '1 hour' "$apt_lists"
expect 7 test "the lists are newer"
touch -d '1 hour ago' "$apt_lists"
expect 7 test "and now they are not"
rm -r "$work/build"
expect 8 test "the build folder was made anew"
echo "apt was asked 8 times in $case_no cases"
