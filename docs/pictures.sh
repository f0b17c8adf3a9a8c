#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# pictures.sh - makes docs/img/ again with colo-plan.
# usage: docs/pictures.sh [--check] [COLO-PLAN]     --check: only says whether they are up to date
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
check=
if [ "${1:-}" = --check ]; then
    check=1
    shift
fi
plan=${1:-$here/../build/tools/colo-plan}
[ -x "$plan" ] || {
    echo "pictures.sh: $plan is no program; build colo-plan, or name it: docs/pictures.sh [--check] COLO-PLAN" >&2
    exit 2
}
out=$(mktemp -d) # a run that fails leaves docs/img as it is
trap 'rm -r "$out"' EXIT

size=(--batch 16 --seq 8192 --hidden 4096)
"$plan" --src tp=2,dp=4 --compare tp=2,cp=2,dp=2:sharded tp=2,cp=2,dp=2:partial tp=4,dp=2 \
    dp=2,cp=2,tp=2:sharded "tp=4,dp=2->tp=2,cp=2,dp=2:sharded" "${size[@]}" \
    --ranks-per-node 4 --svg "$out/compare.svg" >"$out/compare.txt"
"$plan" --src tp=2,dp=4 --dst tp=2,cp=2,dp=2 "${size[@]}" --output sharded \
    --ranks-per-node 4 --svg "$out/fan-in.svg" >/dev/null
"$plan" --src tp=2,dp=4 --dst dp=2,cp=2,tp=2 "${size[@]}" --output sharded \
    --ranks-per-node 4 --svg "$out/order.svg" >/dev/null
"$plan" --src tp=8,dp=131072 --dst tp=8,cp=4,dp=32768 --batch 131072 --seq 8192 --hidden 4096 \
    --output sharded --ranks-per-node 8 --one-level --rank 0 --svg "$out/million.svg" >/dev/null
"$plan" --src dp=128 --dst tp=8,dp=16 --batch 128 --seq 8192 --hidden 4096 --ranks-per-node 8 \
    --svg "$out/part.svg" >/dev/null
"$plan" --src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --batch 48 --seq 16 --hidden 96 --dtype f32 \
    --llm-seq 24 --output sharded --svg "$out/captioner.svg" >/dev/null
"$plan" --src dp=4 --dst cp=2,dp=2 --segments "$here/ragged-batch.json" --hidden 4096 \
    --output sharded --segment 2 --svg "$out/ragged.svg" >/dev/null
"$plan" --src cp=4 --dst cp=4 --packing "$here/packed-batch.json" --hidden 4096 --sequence 1 \
    --svg "$out/packed.svg" >/dev/null
"$plan" --src cp=4 --dst cp=4 --packing "$here/halo-batch.json" --hidden 4096 --sequence 1 \
    --svg "$out/halo.svg" >/dev/null

if [ -n "$check" ]; then
    diff -r "$here/img" "$out" && echo "docs/img is up to date"
else
    cp "$out"/* "$here/img/"
    echo "wrote $(find "$out" -type f | wc -l) files to $here/img"
fi
