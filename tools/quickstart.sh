#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# quickstart.sh - from a clean checkout to the main job: install what is missing, build, train the
# digit captioner on eight in-process ranks, then prove its gradients against a serial fp64 run.
# Options go to colo-captioner; --help lists them.
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

captioner=build/examples/captioner/colo-captioner
case " $* " in
*" --help "*)
    usage
    [ -x "$captioner" ] && exec "$captioner" --help
    printf '\ncolo-captioner is not built yet. Run tools/quickstart.sh; then --help lists its options here.\n'
    exit 0
    ;;
esac

install_missing run
configure build --buildtype=release -Dexamples=enabled
build build

[ -x "$captioner" ] || die "the build made no $captioner"

for arg in "$@"; do
    case $arg in
    --check-gradients) exec "$captioner" "$@" ;;
    esac
done

say "training: an encoder and an LLM on the same ranks, bridged"
"$captioner" "$@"
say "checking every gradient against a serial fp64 run"
"$captioner" "$@" --check-gradients
say "done"
