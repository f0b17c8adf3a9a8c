#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# same-program.sh - do bridges of this working tree do the same as those of another commit?
#
#   tools/same-program.sh REV                 20,000 seeded cases on both
#   tools/same-program.sh REV --cases 2000    fewer; --seed 7: others
#   tools/same-program.sh REV --case 17       the records of one case as text, and where they differ
#
# Each case makes bridges of 1 to 16 ranks and runs them, on threads: uniform and ragged, staged and
# over a stand-in for peers that reach each other, on one level and two, all gradients. Compared are
#   plan        what the getters of plans say
#   exchanges   messages that reach the comm: boxes, places in tensors and in the bridge's own memory
#   transfers   lists that reach the table of peers, whatever their order
#   boxes       calls of the table of a device, in order
#   outputs     every byte of the tensors after a call
#   status      what calls return, and the words of errors
# Prints a line for each. Exit status: 0 all are equal, 1 some differ, 2 it could not be found out.
# Builds lie in build-guard/. tests/guard/ has the recorder. What names the inside of the library, there and
# in tests/harness/, is each commit's own.
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

cases=20000 seed=20261124 case='' words=()
read_options cases=number seed=number case=number words -- "$@"
rev=${words[0]:-} one=$case
[ ${#words[@]} -lt 2 ] || die "one commit, please: \"$rev\" or \"${words[1]}\"?"
[ -n "$rev" ] || die "usage: tools/same-program.sh REV [--cases N] [--seed S] [--case K]"
commit=$(git rev-parse --verify --quiet "$rev^{commit}") || die "there is no commit \"$rev\""

harness=(harness/{bridge_case,bridge_random,harness,host_peers,ragged_case,ragged_run,ranks}.c
    ref/ref_{bridge,ragged,ragged_table}.c)
own=(adapt.h device.c peers.c record.h) # of tests/guard: they name what is inside the library

# recorder FOLDER SOURCE - the library of that source and the recorder on it: FOLDER/record
recorder() {
    local at=$1 source=$2 file wrapped
    mkdir -p "$at/recorder"
    if [ ! -f "$at/lib/build.ninja" ]; then
        say "configuring $at"
        meson setup "$at/lib" "$source" --buildtype=plain -Doptimization=1 -Dtests=disabled -Dtools=disabled \
            -Dexamples=disabled -Dpython=disabled -Dcuda=disabled -Dnccl=disabled -Dmpi=disabled \
            -Ducx=disabled -Dhwloc=disabled -Dcblas=disabled >"$at/configure.log" 2>&1 || {
            cat "$at/configure.log"
            die "could not configure $at"
        }
    fi
    build "$at/lib" src/libcolo-core.a
    cp tests/guard/*.[ch] "$at/recorder"
    for file in "${own[@]}"; do
        [ ! -f "$source/tests/guard/$file" ] || cp "$source/tests/guard/$file" "$at/recorder"
    done
    mapfile -t wrapped < <(grep -oh '__wrap_[a-z_]*' "$at"/recorder/*.[ch] | sed 's/__wrap_//' | sort -u)
    say "building $at/record"
    "${CC:-cc}" -std=gnu11 -O1 -g -D_GNU_SOURCE -DT_BACKENDS='""' -w -pthread \
        -I"$source/include" -I"$source/src" -I"$source/tests" "$at"/recorder/*.c "${harness[@]/#/$source/tests/}" \
        "$at/lib/src/libcolo-core.a" "${wrapped[@]/#/-Wl,--wrap=}" -lcmocka -lm -ldl -o "$at/record" \
        >"$at/record.log" 2>&1 || {
        head -n 40 "$at/record.log"
        die "the recorder does not build on $source: is its tests/guard/adapt.h up to date?"
    }
}

theirs=build-guard/$commit mine=build-guard/tree
if [ ! -d "$theirs/source" ]; then
    rm -rf "$theirs"
    mkdir -p "$theirs/unpacked"
    git archive "$commit" | tar -x -C "$theirs/unpacked"
    mv "$theirs/unpacked" "$theirs/source"
fi
recorder "$theirs" "$theirs/source"
recorder "$mine" "$root"

if [ -n "$one" ]; then
    for at in "$theirs" "$mine"; do
        "$at/record" --text "$one" "$seed" >"$at/case-$one.txt" 2>&1 || echo "exit status $?" >>"$at/case-$one.txt"
    done
    head -n 1 "$mine/case-$one.txt"
    if diff -u "$theirs/case-$one.txt" "$mine/case-$one.txt"; then
        say "case $one: equal in all $(wc -l <"$mine/case-$one.txt") lines of $mine/case-$one.txt"
        exit 0
    fi
    say "case $one differs: whole records in $theirs/case-$one.txt and $mine/case-$one.txt"
    exit 1
fi

# Each on a core of its own, as far as there are: ranks are threads that take turns.
records=cases-$cases-$seed.txt running=()
trap '[ ${#running[@]} = 0 ] || kill "${running[@]}" 2>/dev/null || true' EXIT
for at in "$theirs" "$mine"; do
    # of a commit they stay as they are, if the recorder does
    made=$(cat "$at"/recorder/*.[ch] "${harness[@]/#/tests/}" tests/harness/*.h tests/ref/*.h | sha256sum)
    if [ "$at" = "$theirs" ] && [ "$made" = "$(cat "$at/$records.by" 2>/dev/null)" ]; then
        continue
    fi
    rm -f "$at/$records.by"
    (
        "$at/record" 0 "$cases" "$seed" >"$at/$records" 2>"$at/$records.log" || echo "exit status $?" >>"$at/$records.log"
        [ -s "$at/$records.log" ] || echo "$made" >"$at/$records.by"
    ) &
    running+=($!)
done
done_in() {
    [ ! -f "$1/$records" ] || wc -l <"$1/$records"
}
for ((ticks = 0; ${#running[@]} > 0; ticks++)); do
    [ -n "$(jobs -rp)" ] || break
    [ $((ticks % 10)) != 9 ] || say "$(done_in "$mine") of $cases cases here, $(done_in "$theirs") of $rev"
    sleep 0.5
done
running=()
for at in "$theirs" "$mine"; do
    [ ! -s "$at/$records.log" ] || head -n 5 "$at/$records.log"
done

# a line for each recorder: its name, the cases that differ, the first of them
differences=$(awk -v names="plan exchanges transfers boxes outputs status" '
    NR == FNR { for (k = 2; k <= NF; k++) theirs[$1, k] = $k; n = $1; next }
    { here = $1; for (k = 2; k <= NF; k++) if (theirs[$1, k] != $k) { if (!count[k]++) first[k] = $1 } }
    END {
        split(names, name, " ")
        for (k = 2; k <= 7; k++) print name[k - 1], count[k] + 0, first[k] + 0
        print "ended", n + 1, here + 1
    }' "$theirs/$records" "$mine/$records")
status=0
while read -r name count first; do
    if [ "$name" = ended ]; then
        [ "$count" = "$cases" ] || { status=1 && say "the recorder of $rev ended in case $count of $cases"; }
        [ "$first" = "$cases" ] || { status=1 && say "the recorder of this tree ended in case $first of $cases"; }
    elif [ "$count" = 0 ]; then
        printf '%-10s equal in %d cases\n' "$name" "$cases"
    else
        status=1
        printf '%-10s differs in %d of %d cases, first in case %d:\n  %s\n  tools/same-program.sh %s --seed %s --case %d\n' \
            "$name" "$count" "$cases" "$first" "$("$mine/record" --text "$first" "$seed" 2>/dev/null | head -n 1)" \
            "$rev" "$seed" "$first"
    fi
done <<<"$differences"
say "$([ $status = 0 ] && echo "the same as" || echo "not the same as") $rev in $cases cases of seed $seed"
exit $status
