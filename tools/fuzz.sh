#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh - feeds parsers and planners with mutated input under ASan and UBSan (libFuzzer, clang).
#
#   tools/fuzz.sh                      each target of tests/fuzz for 30 s, as many at a time as cores
#   tools/fuzz.sh --seconds 600 plan   one target for ten minutes
#   tools/fuzz.sh --build              only builds them
#   tools/fuzz.sh --keep               afterwards adds inputs that reach new code to tests/fuzz/corpus
#
# Prints a line per target. An input that fails is left in build-fuzz/TARGET-*; run the target on it
# again with build-fuzz/tests/fuzz/fuzz-TARGET FILE. Make a unit test of what it found.
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

seconds=30 keep=no build=no words=()
read_options seconds=number keep build words -- "$@"
targets=("${words[@]}")
[ "$build" = no ] || seconds=0
corpus=tests/fuzz/corpus
[ ${#targets[@]} != 0 ] || mapfile -t targets < <(cd $corpus && printf '%s\n' *.txt | sed 's/\.txt$//')
has clang && has clang++ || die "fuzz.sh needs clang with libFuzzer (apt-get install clang)"

CC=clang CXX=clang++ configure build-fuzz --buildtype=debugoptimized -Db_sanitize=address,undefined \
    -Db_lundef=false -Dfuzz=true -Dtests=enabled -Dtools=disabled -Dexamples=disabled \
    -Dpython=disabled -Dcuda=disabled -Dnccl=disabled -Dmpi=disabled
build build-fuzz "${targets[@]/#/tests/fuzz/fuzz-}"
[ "$seconds" != 0 ] || exit 0

# One base64 line per input in a text file, one file per input for libFuzzer.
unpack='import base64, pathlib, sys
for i, line in enumerate(open(sys.argv[1])):
    pathlib.Path(sys.argv[2], str(i)).write_bytes(base64.b64decode(line))'
pack='import base64, pathlib, sys
lines = {base64.b64encode(p.read_bytes()).decode() for p in pathlib.Path(sys.argv[2]).iterdir()}
open(sys.argv[1], "w").write("".join(l + "\n" for l in sorted(lines, key=lambda l: (len(l), l))))'

fuzz_one() {
    local t=$1 at=build-fuzz/inputs/$1 program=build-fuzz/tests/fuzz/fuzz-$1 rc=0
    rm -rf "$at" && mkdir -p "$at"
    python3 -c "$unpack" "$corpus/$t.txt" "$at"
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "$program" -max_total_time="$seconds" -max_len=600 \
        -artifact_prefix="build-fuzz/$t-" -print_final_stats=1 "$at" >"build-fuzz/$t.log" 2>&1 || rc=$?
    if [ $rc != 0 ]; then
        say "fuzz $t: FAILED"
        grep -av '^#' "build-fuzz/$t.log" | tail -40 >&2
        return 1
    fi
    say "fuzz $t: $(sed -n 's/^stat::number_of_executed_units: *//p' "build-fuzz/$t.log") inputs in $seconds s, no fault"
    [ "$keep" = no ] || {
        rm -rf "$at.kept" && mkdir "$at.kept"
        "$program" -merge=1 -max_len=160 "$at.kept" "$at" >/dev/null 2>&1
        python3 -c "$pack" "$corpus/$t.txt" "$at.kept"
    }
}

export -f fuzz_one say has
export bold plain seconds keep corpus unpack pack SECONDS
printf '%s\n' "${targets[@]}" | xargs -P "$jobs" -I{} bash -c 'set -euo pipefail; fuzz_one {}'
