#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test.sh - the tests of the release build, but for what takes minutes alone; with --all also that, and the same
# cases under ASan+UBSan as clang compiles them, and, if they have threads, under TSan; fuzzed inputs; some cases as
# clang compiles them without hwloc, MPI, UCX, CUDA and CBLAS; the Python wheel without CUDA (wheel.sh); and
# the pages as a site (site.sh). The last line is "N passed, N failed, N skipped" in test cases. A rerun of a case is not a second case,
# but a failure there makes the case a failed one.
#
#   tools/test.sh                  the release build, without the suites mutants and slow
#   tools/test.sh --all            all of it, except the suite ucx-all
#   tools/test.sh --suite NAME     one suite (repeat for more); with --all under the sanitizers, too
#   tools/test.sh --torch          suite python with the current PyTorch, transformers and TRL of the package index, in build-torch
#   tools/test.sh --list           names of the suites
#   tools/test.sh --coverage       lines of src/, and branches of what parses and validates, that suites reach
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

all=no torch=no list=no coverage=no suite=() suites=()
# --quick is what it does anyway
read_options all quick torch list coverage 'suite[]=name; --list prints them' -- "$@"
[ "$torch" = no ] || suite+=(python)
for name in "${suite[@]}"; do
    suites+=(--suite "$name")
done

install_missing test

if [ "$torch" = yes ]; then
    say "installing the current PyTorch in build-torch"
    python=$(python_with ensurepip) || die "no Python with ensurepip (Debian: python3-venv)"
    "$python" -m venv build-torch
    build-torch/bin/pip install --quiet --upgrade --disable-pip-version-check torch numpy pytest expecttest setuptools \
        transformers trl peft accelerate nbclient ipykernel
    export COLO_PYTHON=$root/build-torch/bin/python
    say "PyTorch $("$COLO_PYTHON" -c 'import torch; print(torch.__version__)')"
fi

# What decides whether input from outside is allowed.
checks='src/(grid/(spec|dims|topology-xml)|core/(env|sized|tensor)|bridge/(fields|layout|layout-fields|segments)|loss/(validate|support)|loss/linear/check|comm/process/(address|arrive))\.c'
if [ "$coverage" = yes ]; then
    has gcovr || apt_install gcovr '' || die "missing: gcovr"
    configure build-coverage --buildtype=debug -Db_coverage=true -Dtests=enabled -Dtools=enabled \
        -Dexamples=disabled -Dpython=disabled -Dcuda=disabled -Dnccl=disabled \
        -Dc_args=-fprofile-update=atomic # threads of a rank count the same branch
    # shellcheck disable=SC2046 # a list of names
    build build-coverage all $(linked build-coverage tests)
    find build-coverage -name '*.gcda' -delete
    say "running the tests that have no time of their own"
    meson test -C build-coverage --num-processes $((2 * jobs)) --no-suite slow --no-suite python --no-suite api \
        --no-suite ucx-all --timeout-multiplier 4 "$every_test" </dev/null >build-coverage/test.log || tail -n 12 build-coverage/test.log
    # gcov derives some counts from others, and one may come out below zero: it is left out, and told.
    gcovr --root . --object-directory build-coverage --filter src/ --gcov-ignore-parse-errors \
        --json build-coverage/all.json build-coverage/src/libcolo-core.a.p
    gcovr --root . --add-tracefile build-coverage/all.json --txt build-coverage/lines.txt --print-summary
    gcovr --root . --add-tracefile build-coverage/all.json --filter "$checks" --branches
    exit 0
fi
# GPU code takes minutes of nvcc, of which a machine without a GPU runs nothing.
gpu_code=auto
[ "$all" = yes ] || has nvidia-smi || gpu_code=disabled
configure build --buildtype=release -Dtests=enabled -Dtools=enabled -Dexamples=enabled \
    -Dcuda=$gpu_code -Dnccl=$gpu_code
if [ "$list" = yes ]; then
    meson introspect build --tests | python3 -c 'import json, sys
print("\n".join(sorted({s.split(":")[-1] for t in json.load(sys.stdin) for s in t["suite"]})))'
    exit 0
fi

logs=() cases=()
# judge NAME COMMAND... - what is no program's test but passes or fails: a case of its own; status 77 is a skip
judge() {
    local name=$1 rc=0 status=failed
    shift
    "$@" || rc=$?
    [ $rc != 0 ] || status=passed
    [ $rc != 77 ] || status=skipped
    [ "$status" != failed ] || say "failed: $name"
    cases+=(--case "$name=$status")
    [ "$status" = passed ]
}

# run_tests DIR MESON-TEST-OPTIONS... - never stops the script: count-tests.py judges. More at a time than
# there are cores, because much of it waits for a deadline or a peer. Meson names the log testlog.json, or testlog-SETUP.json, or after the wrapper.
run_tests() {
    local dir=$1 rc=0 log
    shift
    # A rerun may have nothing of the suites that were asked for.
    [ ${#suites[@]} = 0 ] || meson test -C "$dir" --no-rebuild --list "$@" 2>&1 | grep / >/dev/null || return 0
    rm -f "$dir"/meson-logs/testlog*.json
    meson test -C "$dir" --num-processes $((3 * jobs)) --print-errorlogs "$@" </dev/null || rc=$?
    for log in "$dir"/meson-logs/testlog*.json; do
        logs+=("$log=$rc")
    done
}

no_warnings() {
    ! grep -q 'warning:' "$1/build.log"
}

programs='' here=() notes=()
if [ "$torch" = yes ]; then
    here=(--no-suite mutants)
elif [ ${#suites[@]} = 0 ]; then # of suites, `meson test` builds what it runs
    programs=$(programs_of_tests build)
    if [ "$all" = no ]; then
        here=(--no-suite mutants --no-suite slow)
        programs=$(grep -v '^tests/mutation/\|/mutants\|/libmutant-\|^bench/' <<<"$programs")
        notes=(--note "tools/test.sh --all adds the suites slow and mutants (planted bugs, which a test must notice), ASan+UBSan,"
            --note "TSan, fuzzed inputs, a build without hwloc, MPI, UCX, CUDA and CBLAS, GPU code without a GPU, and the Python wheel.")
    fi
fi
# shellcheck disable=SC2086 # a list of names
build build all $programs
judge "it builds without a warning" no_warnings build || true
[[ " ${suites[*]} " == *" ucx-all "* ]] || here+=(--no-suite ucx-all)
if ! has nvidia-smi; then # they would take minutes of nvcc, to be skipped
    here+=(--no-suite gpu-mutants)
    [ "$all" = no ] || cases+=(--case "mutants of GPU code=skipped")
fi

# rerun NAME WHAT SUITES-LEFT-OUT MESON-TEST-OPTIONS... - builds build-NAME, as configured, and runs its setup of
# that name in tests/meson.build. A build that fails is a failed case. A suite is a folder: the programs of those
# that are left out are not built, and of tools and examples what a test runs.
rerun() {
    local name=$1 what=$2 left_out=$3
    shift 3
    # shellcheck disable=SC2046 # a list of names
    judge "it builds $what" build "build-$name" $([ ${#suites[@]} != 0 ] ||
        linked "build-$name" src tests | grep -Ev "^tests/($left_out)/") || return 0
    say "running the tests again $what"
    run_tests "build-$name" --setup "$name" "$@" "${suites[@]}" "$every_test"
}

# GPU code is built once, above: nvcc has nothing more to say to another C compiler or sanitizer.
everything=(-Dtests=enabled -Dtools=enabled -Dexamples=enabled -Dcuda=disabled -Dnccl=disabled)
lacks="hwloc, MPI, UCX, CUDA and CBLAS"

# The library, the tools and some tests without all that a build can lack, without a warning. One build for all:
# each lack is another file in the place of the one that needs the library.
bare() {
    local some=(core/backend comm/hypergrid comm/comm_threads bridge/bridge_check tools/colo_plan
        tools/colo_info loss/product loss/linear_special examples/02_bridge
        'api/every header compiles alone as C11' 'api/every header compiles alone as C++17')
    configure build-bare --buildtype=debug --werror -Dhwloc=disabled -Dmpi=disabled \
        -Ducx=disabled -Dcblas=disabled "${everything[@]}"
    # shellcheck disable=SC2046 # a list of names
    judge "it builds without $lacks" build build-bare $(linked build-bare src tools) || return 0
    say "running some tests without $lacks"
    run_tests build-bare "${some[@]}"
}

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

# sanitized NAME SANITIZERS SUITES-LEFT-OUT...
sanitized() {
    local name=$1 kinds=$2 left_out more=() suite
    left_out=$(IFS='|' && echo "${*:3}")
    for suite in "${@:3}"; do
        more+=(--no-suite "$suite")
    done
    if ! sanitizer_starts "$kinds"; then
        if has setarch && sanitizer_starts "$kinds" setarch "$(uname -m)" -R; then
            more+=(--wrapper "setarch $(uname -m) -R")
        else
            say "$kinds: a program built with it does not start on this machine; rerun left out"
            cases+=(--case "it builds under $kinds=skipped")
            return 0
        fi
    fi
    configure "build-$name" --buildtype=debugoptimized "-Db_sanitize=$kinds" -Db_lundef=false \
        "${everything[@]}" "${options[@]}"
    rerun "$name" "under $kinds" "$left_out" "${more[@]}"
}

# Behind the builds, because they have more to do: each target of tests/fuzz for 5 s, if clang has libFuzzer,
# in what all else leaves of the processors. Where the kernel groups processes by session, nice counts within
# one, and Meson gives each test its own: there the session has a niceness, too.
fuzz() {
    local probe
    probe=$(mktemp -d)
    echo 'int LLVMFuzzerTestOneInput(const char *d, long n) { return !d && n; }' >"$probe/probe.c"
    if clang -fsanitize=fuzzer,address -o "$probe/probe" "$probe/probe.c" 2>/dev/null; then
        # shellcheck disable=SC2016 # it is that bash that expands it
        setsid bash -c '{ echo 19 >/proc/self/autogroup; } 2>/dev/null
            tail -f --pid="$1" /dev/null
            exec nice -n 19 tools/fuzz.sh --seconds 5' fuzz "$ahead" </dev/null >build/fuzz.log 2>&1 &
        fuzzing=$! behind+=("$!")
    else
        say "clang has no libFuzzer; fuzzing left out"
        cases+=(--case "fuzzed inputs find no fault=skipped")
    fi
    rm -rf "$probe"
}

# waited PID LOG - waits for what runs behind the tests, shows what it said, and has its status
waited() {
    local rc=0
    wait "$1" || rc=$?
    cat "$2"
    return $rc
}

# By clang, if it is here, because a second compiler sees other things, and clang takes half of gcc's time for ASan.
reruns() {
    local compiler=(CC=clang CXX=clang++) options=(--werror --optimization=1)
    if ! has clang || ! has clang++; then
        say "no clang: the reruns are built by ${CC:-cc}"
        cases+=(--case "it builds with clang=skipped")
        compiler=("CC=${CC:-cc}" "CXX=${CXX:-c++}") options=()
    elif ! CC=clang sanitizer_starts address,undefined; then
        options=()
    fi
    by_clang() {
        local -x "${compiler[@]}"
        "$@"
    }
    # Clang that lacks ASan's library compiles what is below.
    if [ ${#options[@]} != 0 ]; then
        by_clang sanitized asan address,undefined api slow ucx-all
    else
        sanitized asan address,undefined api slow ucx-all
    fi
    options=(--optimization=1)
    [ ${#suites[@]} != 0 ] || by_clang bare
    # api looks at the shipped files, slow is what is too long here, TSan is for what has threads.
    sanitized tsan thread api slow serial core tools
}

# The tests of the release build wait for each other a lot. In that time, and behind them, a process
# group of its own compiles what the reruns need; what fails there fails again, and is told, later.
compile_ahead() {
    run_tests() { :; }
    judge() { "${@:2}" || true; }
    ! has renice || renice -n 19 "$BASHPID" || true
    reruns
    [ ${#suites[@]} != 0 ] || tools/fuzz.sh --build || true
}

if [ "$all" = yes ]; then
    set -m
    compile_ahead </dev/null >build/ahead.log 2>&1 &
    ahead=$! behind=("$!")
    # The last tests run alone and leave processors idle; what downloads waits anyway.
    if [ ${#suites[@]} = 0 ]; then
        (tail -f --pid="$ahead" /dev/null && exec tools/wheel.sh --cpu) </dev/null >build/wheel.log 2>&1 &
        wheel=$! behind+=("$!")
        (tail -f --pid="$ahead" /dev/null && exec tools/site.sh) </dev/null >build/site.log 2>&1 &
        site=$! behind+=("$!")
        (tail -f --pid="$ahead" /dev/null && exec tools/wheel.sh --types) </dev/null >build/types.log 2>&1 &
        types=$! behind+=("$!")
    fi
    set +m
    [ ${#suites[@]} != 0 ] || fuzz
    trap 'kill -- "${behind[@]/#/-}" 2>/dev/null || true' EXIT
fi
say "running the tests of the release build"
run_tests build "${here[@]}" "${suites[@]}" "$every_test"
if [ "$all" = yes ]; then
    say "waiting for the builds of the reruns"
    ! wait "$ahead" || configure() { :; } # it has been done
    behind=("${behind[@]:1}")
    reruns
    [ -z "${fuzzing-}" ] || judge "fuzzed inputs find no fault" waited "$fuzzing" build/fuzz.log || true
    if [ ${#suites[@]} = 0 ]; then
        judge "a wheel installs and works without a compiler" waited "$wheel" build/wheel.log || true
        judge "pyright finds nothing in the Python package" waited "$types" build/types.log || true
        judge "the pages make a site without a broken link" waited "$site" build/site.log || true
        judge "workflows, forms and the citation are what they should be" tools/lint.sh --workflows || true
    fi
    trap - EXIT
fi

say "counting"
python3 tools/count-tests.py "${cases[@]}" "${notes[@]}" "${logs[@]}"
