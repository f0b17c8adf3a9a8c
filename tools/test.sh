#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test.sh - every test: the release build, then the same cases again under ASan+UBSan and, where
# there are threads, under TSan. The last line is "N passed, N failed, N skipped" in test cases;
# a rerun of a case is not a second case, but a failure there makes the case a failed one.
#
#   tools/test.sh                  all of it
#   tools/test.sh --quick          the release build only
#   tools/test.sh --suite NAME     one suite (repeat for more), in all three builds
#   tools/test.sh --list           names of the suites
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    sed -n '3,10s/^# \{0,1\}//p' "$root/tools/test.sh"
}

quick=no list=no suites=()
while [ $# -gt 0 ]; do
    case $1 in
    --quick) quick=yes ;;
    --list) list=yes ;;
    --suite)
        [ $# -ge 2 ] || die "--suite wants a name; --list prints them"
        suites+=(--suite "$2")
        shift
        ;;
    --help)
        usage
        exit 0
        ;;
    *) die "unknown option \"$1\"; --help lists them" ;;
    esac
    shift
done

install_missing test
configure build --buildtype=release -Dtests=enabled -Dtools=enabled -Dexamples=enabled
if [ "$list" = yes ]; then
    meson introspect build --tests | python3 -c 'import json, sys
print("\n".join(sorted({s.split(":")[-1] for t in json.load(sys.stdin) for s in t["suite"]})))'
    exit 0
fi
build build

logs=() notes=()
# run_tests DIR LOGBASE MESON-TEST-OPTIONS... - never stops the script: count-tests.py judges the log.
run_tests() {
    local dir=$1 base=$2
    shift 2
    local log="$dir/meson-logs/$base.json" rc=0
    rm -f "$log"
    meson test -C "$dir" --logbase "$base" --num-processes "$jobs" --print-errorlogs \
        "$@" </dev/null || rc=$?
    # A rerun may have nothing of the suites that were asked for: no log and status 0.
    [ "$rc" = 0 ] && [ ! -f "$log" ] || logs+=("$log=$rc")
}

say "running the tests of the release build"
run_tests build testlog "${suites[@]}"

# Can a program of this sanitizer start at all? (Some kernels place memory where TSan cannot live.)
sanitizer_starts() {
    local probe
    probe=$(mktemp -d)
    echo 'int main(void) { return 0; }' >"$probe/probe.c"
    "${CC:-cc}" "-fsanitize=$1" -o "$probe/probe" "$probe/probe.c" 2>/dev/null &&
        "${@:2}" "$probe/probe" >/dev/null 2>&1
    local rc=$?
    rm -rf "$probe"
    return $rc
}

# rerun NAME SANITIZERS SUITES-LEFT-OUT... - the setup of that name in tests/meson.build says how
rerun() {
    local name=$1 kinds=$2 wrapper=() without=() suite
    for suite in "${@:3}"; do
        without+=(--no-suite "$suite")
    done
    if ! sanitizer_starts "$kinds"; then
        if has setarch && sanitizer_starts "$kinds" setarch "$(uname -m)" -R; then
            wrapper=(--wrapper "setarch $(uname -m) -R")
        else
            say "$kinds: a program built with it does not start on this machine; rerun left out"
            notes+=(--skip "rerun under $kinds")
            return 0
        fi
    fi
    configure "build-$name" --buildtype=debugoptimized "-Db_sanitize=$kinds" -Db_lundef=false \
        -Dtests=enabled -Dtools=enabled -Dexamples=enabled
    build "build-$name"
    say "running the tests again under $kinds"
    run_tests "build-$name" "testlog-$name" --setup "$name" "${without[@]}" \
        "${wrapper[@]}" "${suites[@]}"
}

if [ "$quick" = no ]; then
    # api looks at the shipped files, mutants must be red anyway, slow is what is too long here.
    rerun asan address,undefined api mutants slow
    # TSan is for what has threads.
    rerun tsan thread api mutants slow serial core tools
fi

say "counting"
python3 tools/count-tests.py "${notes[@]}" "${logs[@]}"
