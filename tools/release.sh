#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# release.sh - all that a release needs, in order: the version and the date where they stand, in version.h, CITATION.cff
# and CHANGELOG.md, the ABI against the baseline and then a new baseline, what is made by scripts, all checks, the wheels and the source
# archive in dist/, a commit and a tag. Nothing is pushed; the last line says what to push. What fails ends it.
#
#   tools/release.sh 0.1.0              needs a clean tree; hours, most of them tests on bare systems and nvcc
#   tools/release.sh --dry-run 0.1.0    says each step, does none, and fails if the release would not begin
#   tools/release.sh --from wheels 0.1.0    goes on with a step, on what the steps before it have changed
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

dry_run=no from='' words=()
read_options dry-run 'from=step; --dry-run names them' words -- "$@"
[ ${#words[@]} = 1 ] && [[ ${words[0]} =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || die "which version? --help says how"
version=${words[0]}
today=$(date -u +%F)
steps=(version changelog abi made checks systems wheels commit archive tag)
[ -z "$from" ] || [[ " ${steps[*]} " = *" $from "* ]] || die "no step \"$from\": ${steps[*]}"

# What must hold before anything is changed.
[ -z "$from" ] && [ "$dry_run" = no ] && [ -n "$(git status --porcelain --untracked-files=no)" ] &&
    die "the tree has changes that are not committed"
[ -z "$(git tag --list "v$version")" ] || die "there is a tag v$version"
grep -q "^## \[$version\] - " CHANGELOG.md || die "CHANGELOG.md has no section \"## [$version] - unreleased\""

# run COMMAND... - in a dry run only says it
run() {
    echo "    $*"
    [ "$dry_run" = yes ] || "$@"
}

# replace FILE PATTERN TEXT - in the one line of the file that has the pattern
replace() {
    [ "$(grep -cE "$2" "$1")" = 1 ] || die "$1: $(grep -cE "$2" "$1") lines have \"$2\", expected one"
    run sed -Ei "s/$2/$3/" "$1"
}

step_version() {
    replace CITATION.cff '^version: .*' "version: $version"
    local part=(MAJOR MINOR PATCH) number i
    IFS=. read -ra number <<<"$version"
    for i in 0 1 2; do
        replace include/colobridge/version.h "define COLO_VERSION_${part[i]} [0-9]+" "define COLO_VERSION_${part[i]} ${number[i]}"
    done
}

step_changelog() {
    replace CHANGELOG.md "^## \[$version\] - .*" "## [$version] - $today"
    if grep -q '^date-released:' CITATION.cff; then
        replace CITATION.cff '^date-released: .*' "date-released: $today"
    else
        run sed -i "/^version: /a date-released: $today" CITATION.cff
    fi
}

# Programs of the last release run with this one, or the SONAME is another.
step_abi() {
    run python3 tests/api/abi.py "${CC:-cc}"
    run python3 tests/api/abi.py --write
}

step_made() {
    run python3 python/generate.py --write
    run python3 tests/api/symbols.py --write
    run python3 tests/readme.py --write
    run bench/plot.py --write
    run git diff --stat
}

step_checks() {
    run .ci/run
    run tools/lint.sh
}

step_systems() {
    run tools/systems.sh
}

step_wheels() {
    run tools/wheel.sh dist
    run tools/wheel.sh --aarch64 dist
}

step_commit() {
    run git commit -qam "release: $version"
}

# Of the commit, which checks and systems have tested.
step_archive() {
    run meson setup --reconfigure build
    run meson dist -C build --formats xztar --no-tests
    run mkdir -p dist
    run cp "build/meson-dist/colobridge-$version.tar.xz" dist/
    run tools/wheel.sh --sdist dist
}

step_tag() {
    run git tag -a "v$version" -m "colobridge $version"
    say "look at dist/ and at the commit, then: git push origin main v$version"
}

for name in "${steps[@]}"; do
    [ -z "$from" ] || [ "$from" = "$name" ] || continue
    from=''
    say "$name"
    "step_$name"
done
