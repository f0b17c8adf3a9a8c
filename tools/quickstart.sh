#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# quickstart.sh - from a clean checkout to the main job: install what is missing, build, train the
# digit captioner on eight in-process ranks, then prove its gradients against a serial fp64 run.
# Options go to colo-captioner (tools/quickstart.sh --help lists them once it is built).
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

install_missing run
configure build --buildtype=release -Dexamples=enabled
build build

captioner=build/examples/captioner/colo-captioner
[ -x "$captioner" ] || die "the build made no $captioner"

for arg in "$@"; do
    case $arg in
    --help | --check-gradients) exec "$captioner" "$@" ;;
    esac
done

say "training: an encoder and an LLM on the same ranks, bridged"
"$captioner" "$@"
say "checking every gradient against a serial fp64 run"
"$captioner" "$@" --check-gradients
say "done"
