#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# soak.sh - runs random bridges and ragged batches for long, on eight threads and on eight processes over
# sockets: random layouts, tables and sizes, aborts, worlds made anew. Each value is compared with the integer
# oracle; descriptors, threads, heap and memory of GPUs may not grow.
#
#   tools/soak.sh                    10 minutes each
#   tools/soak.sh --gpu              on GPUs, 100 seconds each: threads and processes with a GPU each, over NCCL
#                                    and peer memory; eight threads over peer memory on the GPUs that there are
#   tools/soak.sh --minutes 1        1 minute each, as --seconds 60
#   tools/soak.sh --ranks sockets    one kind: threads, sockets, gpu, gpu-sockets or gpu-peers; repeat for more
#   tools/soak.sh --seed 1234        the same worlds again; the default is the time
#   tools/soak.sh --seed 1234 --worlds 1    repeats one world, as a failure says
#
# A line each 10 s, a table at the end. Exit 1: a mismatch, a leak, a wrong status or a hang.
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

minutes='' seconds='' gpu=no ranks=() default=(threads sockets) seed=$(date +%s) worlds=0
read_options minutes=value seconds=value gpu 'ranks[]=value' seed=value worlds=value -- "$@"
for kind in "${ranks[@]}"; do
    [[ " threads sockets gpu gpu-sockets gpu-peers " = *" $kind "* ]] ||
        die "--ranks $kind, expected threads, sockets, gpu, gpu-sockets or gpu-peers"
done
[ -z "$minutes" ] || seconds=$((minutes * 60))
[ "$gpu" = no ] || default=(gpu gpu-sockets gpu-peers) seconds=${seconds:-100}
[ ${#ranks[@]} != 0 ] || ranks=("${default[@]}")
seconds=${seconds:-600}

install_missing test
if [[ " ${ranks[*]} " = *" gpu"* ]]; then
    configure build-gpu --buildtype=release -Dcuda=enabled -Dtests=enabled -Dtools=enabled -Dexamples=auto
    build build-gpu tests/gpu/soak
fi
if [[ " ${ranks[*]} " =~ " "(threads|sockets)" " ]]; then
    configure build --buildtype=release -Dtests=enabled -Dtools=enabled -Dexamples=enabled
    build build tests/soak/soak
fi

# malloc()'s caches per thread would count as memory in use.
export GLIBC_TUNABLES=glibc.malloc.tcache_count=0
table=() failed=no
for kind in "${ranks[@]}"; do
    of=build way=$kind command=(tests/soak/soak "$seconds" "$seed" "$worlds") rc=0
    case $kind in
    gpu*)
        of=build-gpu way=threads command=(env CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_NVLS_ENABLE=0
            "COLO_BACKEND_DIR=$root/build-gpu/tests/gpu/backends" "${command[@]/soak\//gpu/}")
        [ "$kind" != gpu-sockets ] || way=sockets
        # Its backend, of tests only, does not load kernels when a communicator is made.
        [ "$kind" != gpu-peers ] || command=(env SOAK_PEERS=1 CUDA_MODULE_LOADING=EAGER "${command[@]}")
        ;;
    esac
    say "ranks as $kind for $seconds s, seed $seed"
    (cd $of && T_RANKS=$way timeout $((seconds + 120)) "${command[@]}" </dev/null) | tee $of/soak.log || rc=$?
    [ $rc = 0 ] || [ $rc = 77 ] || failed=yes
    [ $rc != 124 ] || echo "a hang: ended 2 minutes after its time" | tee -a $of/soak.log
    table+=("$(printf '%-11s %6d s  seed %-12s %s' "$kind" "$seconds" "$seed" "$(tail -n 1 $of/soak.log)")")
done
printf '%s\n' "${table[@]}"
[ "$failed" = no ]
