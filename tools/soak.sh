#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# soak.sh - runs random bridges and ragged batches for long, on eight threads, eight processes over
# sockets, and eight MPI ranks: random layouts, tables and sizes, aborts, worlds made anew. Each value is
# compared with the integer oracle; descriptors, threads and heap may not grow.
#
#   tools/soak.sh                    10 minutes each
#   tools/soak.sh --minutes 1        1 minute each
#   tools/soak.sh --ranks sockets    one kind: threads, sockets or mpi; repeat for more
#   tools/soak.sh --seed 1234        the same worlds again; the default is the time
#   tools/soak.sh --seed 1234 --worlds 1    repeats one world, as a failure says
#
# A line each 10 s, a table at the end. Exit 1: a mismatch, a leak, a wrong status or a hang.
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

seconds=600 kinds=() seed=$(date +%s) worlds=0
while [ $# -gt 0 ]; do
    case $1 in
    --help)
        sed -n '3,13s/^# \{0,1\}//p' "$root/tools/soak.sh"
        exit 0
        ;;
    --minutes | --ranks | --seed | --worlds) [ $# -ge 2 ] || die "$1 wants a value" ;;
    *) die "unknown option \"$1\"; --help lists them" ;;
    esac
    case $1 in
    --minutes) seconds=$(($2 * 60)) ;;
    --ranks) kinds+=("$2") ;;
    --seed) seed=$2 ;;
    --worlds) worlds=$2 ;;
    esac
    shift 2
done
[ ${#kinds[@]} != 0 ] || kinds=(threads sockets mpi)

install_missing test
configure build --buildtype=release -Dtests=enabled -Dtools=enabled -Dexamples=enabled
targets=(tests/soak/soak)
! has mpirun || targets+=(src/libcolobridge-mpi.so tests/harness/libt-mpi.so)
build build "${targets[@]}"

# malloc()'s caches per thread would count as memory in use.
export GLIBC_TUNABLES=glibc.malloc.tcache_count=0
table=() failed=no
for kind in "${kinds[@]}"; do
    command=(build/tests/soak/soak "$seconds" "$seed" "$worlds") rc=0
    [ "$kind" != mpi ] || command=(python3 -B tests/mpi/mpirun.py 8 "${command[@]}")
    say "8 ranks as $kind for $seconds s, seed $seed"
    T_RANKS=$kind timeout $((seconds + 120)) "${command[@]}" </dev/null | tee build/soak.log || rc=$?
    [ $rc = 0 ] || [ $rc = 77 ] || failed=yes
    [ $rc != 124 ] || echo "a hang: ended 2 minutes after its time" | tee -a build/soak.log
    table+=("$(printf '%-8s %6d s  seed %-12s %s' "$kind" "$seconds" "$seed" "$(tail -n 1 build/soak.log)")")
done
printf '%s\n' "${table[@]}"
[ "$failed" = no ]
