#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu-test.sh - the tests that need GPUs, on a host that has some. Builds in build-gpu; programs that
# want more GPUs than there are count as skipped. Those that want one run on all GPUs at a time, then
# the others one after the other. At the end it prints the wall time of each part and of the slowest tests. The last
# line is "N passed, N failed, N skipped".
#
#   tools/gpu-test.sh              build, run the gpu suite: parts one, ranks and mutants
#   tools/gpu-test.sh --sanitize   the same again under compute-sanitizer: parts memcheck and racecheck
#   tools/gpu-test.sh --perf       afterwards, what colo-perf measures: part perf
#   tools/gpu-test.sh --part one   only this part; repeat for more
#
# 8 ranks on fewer GPUs, for what they compute, not how fast: with NCCL 2.30 or later in front of
# LD_LIBRARY_PATH, and
#
#   NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4 NCCL_SET_STACK_SIZE=1 tools/gpu-test.sh
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

parts=(one ranks mutants) sanitize=no perf=no part=()
read_options sanitize perf 'part[]=name; --help lists them' -- "$@"
[ "$sanitize" = no ] || parts+=(memcheck racecheck)
[ "$perf" = no ] || parts+=(perf)
for asked in "${part[@]}"; do
    [[ " one ranks mutants memcheck racecheck perf " = *" $asked "* ]] || die "no part \"$asked\"; --help lists them"
done
[ ${#part[@]} = 0 ] || parts=("${part[@]}")

has nvcc || [ -x /usr/local/cuda/bin/nvcc ] || die "no nvcc: install the CUDA toolkit (12.1 or later)"
has nvidia-smi && nvidia-smi -L || say "nvidia-smi sees no GPU: everything will be skipped"

install_missing test
configure build-gpu --buildtype=release -Dcuda=enabled -Dtests=enabled -Dtools=enabled -Dexamples=auto
build build-gpu

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # meson in the background does not hear Ctrl-C
logs=()
# count NAME STATUS - Meson adds a wrapper's name to that of the log.
count() {
    local log
    for log in "build-gpu/meson-logs/testlog-$1"*.json; do
        logs+=("$log=$2")
    done
}

# run_gpu NAME MESON-TEST-OPTIONS... - one test at a time: they share the GPUs.
run_gpu() {
    local rc=0
    rm -f "build-gpu/meson-logs/testlog-$1"*.json
    meson test -C build-gpu --logbase "testlog-$1" --num-processes 1 \
        --print-errorlogs "${@:2}" "$every_test" </dev/null || rc=$?
    count "$1" $rc
}

# run_one_gpu - each GPU has its share of the tests that want one.
run_one_gpu() {
    local gpus i tests waiting=() rc
    gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
    gpus=$((gpus > 0 ? gpus : 1))
    meson introspect build-gpu --tests | python3 -c 'import json, sys
print(*(t["name"] for t in json.load(sys.stdin) if any(s.endswith(":gpu-one") for s in t["suite"])), sep="\n")' \
        >build-gpu/one-gpu.txt
    rm -f build-gpu/meson-logs/testlog-one-*.json
    for ((i = 0; i < gpus; i++)); do
        mapfile -t tests < <(awk -v n="$gpus" -v i="$i" 'NR % n == i' build-gpu/one-gpu.txt)
        CUDA_VISIBLE_DEVICES=$i meson test -C build-gpu --no-rebuild --logbase "testlog-one-$i-of" \
            --num-processes 1 --print-errorlogs "${tests[@]}" </dev/null &
        waiting+=($!)
    done
    for ((i = 0; i < gpus; i++)); do
        rc=0
        wait "${waiting[i]}" || rc=$?
        count "one-$i-of" $rc
    done
}

# ---- parts ----

run_ranks() {
    run_gpu ranks --suite gpu --no-suite gpu-one --no-suite gpu-mutants
}

run_mutants() {
    run_gpu mutants --suite gpu-mutants --no-suite gpu-one
}

# few cases: a checked kernel is 10 to 100 times slower. Refused calls are expected ones.
run_checked() {
    local sanitizer
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    [ -x "$sanitizer" ] || die "no compute-sanitizer: it comes with the CUDA toolkit"
    T_CHECKED=1 T_SCALE=4 run_gpu "$1" --suite gpu --no-suite slow --timeout-multiplier 10 \
        --wrapper "$sanitizer --target-processes all --tool $1 --report-api-errors no --error-exitcode 99"
}

run_perf() {
    build-gpu/tools/colo-perf link
    build-gpu/tools/colo-perf logprob
    build-gpu/tools/colo-perf logprob --entropy
    if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
        bench/bridge-table.py --perf build-gpu/tools/colo-perf --keep build-gpu/bridge-table
    fi
}

# Meson's runs at a time must find everything built.
# shellcheck disable=SC2046 # a list of names
build build-gpu $(linked build-gpu tests/gpu)
declare -A what=([one]="what wants one GPU" [ranks]="what wants several" [mutants]="mutants that want several"
    [memcheck]="the gpu suite under memcheck" [racecheck]="the gpu suite under racecheck" [perf]="colo-perf")
declare -A run=([one]=run_one_gpu [ranks]=run_ranks [mutants]=run_mutants [memcheck]="run_checked memcheck"
    [racecheck]="run_checked racecheck" [perf]=run_perf)
times=(build $SECONDS)
for part in "${parts[@]}"; do
    since=$SECONDS
    say "running ${what[$part]}"
    ${run[$part]}
    times+=("$part" $((SECONDS - since)))
done

say "counting"
printf '%-10s %5d s\n' "${times[@]}" total $SECONDS
python3 - "${logs[@]%=*}" <<'END' || true # a log that is not there is count-tests.py's
import json, sys
tests = [json.loads(line) for log in sys.argv[1:] for line in open(log, errors='replace') if line.strip()]
for test in sorted(tests, key=lambda test: -test['duration'])[:8]:
    print('%6.1f s  %s' % (test['duration'], test['name']))
END
[ ${#logs[@]} = 0 ] || python3 tools/count-tests.py "${logs[@]}"
