#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# lint.sh - what reads or watches the code without judging its results: gcc -fanalyzer, clang-tidy and
# cppcheck; UBSan for conversions that lose something; valgrind.
#
#   tools/lint.sh                  the analyzers over src/ and tools/; again only for what has changed
#   tools/lint.sh FILE...          these sources only
#   tools/lint.sh --ubsan          unit suites with clang's implicit-conversion and float-cast-overflow
#   tools/lint.sh --valgrind       unit suites without ranks, and small ones with, under memcheck
#   tools/lint.sh --workflows      .github and CITATION.cff: actionlint, if it is here; their schemas, and yamllint, from
#                                  the package index; status 77 without one
#
# Rules are in .clang-tidy, lint.py and lint-suppressions.txt, each exception with its reason. Exit 1: a remark.
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

what=analyzers ubsan=no valgrind=no workflows=no words=()
read_options ubsan valgrind workflows words -- "$@"
files=("${words[@]}")
[ "$ubsan" = no ] || what=ubsan
[ "$valgrind" = no ] || what=valgrind
[ "$workflows" = no ] || what=workflows

missing='' tools=()
case $what in
analyzers) tools=(gcc clang-tidy cppcheck) ;;
ubsan) tools=(clang) ;;
valgrind) tools=(valgrind) ;;
esac
for tool in "${tools[@]}"; do
    has "$tool" || missing+=" $tool"
done
[ -z "$missing" ] || apt_install "$missing" '' || die "missing:$missing"
[ "$what" = workflows ] || install_missing test
# GPU code is left to nvcc: its sources include CUDA's headers.
options=(-Dtests=enabled -Dtools=enabled -Dexamples=disabled -Dpython=disabled -Dcuda=disabled -Dnccl=disabled)

# watched DIR MESON-TEST-OPTIONS... - the unit suites of what has no processes
watched() {
    # shellcheck disable=SC2046 # a list of names
    build "$1" $(linked "$1" tests/core tests/grid tests/comm tests/bridge tests/loss)
    meson test -C "$1" --num-processes "$jobs" --print-errorlogs --no-suite python --no-suite api --no-suite mpi \
        --no-suite slow --no-suite tools "${@:2}" "$every_test" </dev/null
}

case $what in
workflows)
    python=$(python_with ensurepip) || { say "no Python with ensurepip (Debian: python3-venv)" && exit 77; }
    there=$(mktemp -d)
    trap 'rm -rf "$there"' EXIT
    "$python" -m venv "$there"
    "$there/bin/pip" install --quiet --timeout 20 --retries 1 --disable-pip-version-check yamllint check-jsonschema ||
        { say "no package index" && exit 77; }
    # of kind SCHEMA FILES...
    of_kind() { "$there/bin/check-jsonschema" --builtin-schema "vendor.$1" "${@:2}"; }
    "$there/bin/yamllint" --strict .github CITATION.cff .yamllint mkdocs.yml
    of_kind github-workflows .github/workflows/*.yml
    of_kind github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
    of_kind github-issue-config .github/ISSUE_TEMPLATE/config.yml
    of_kind citation-file-format CITATION.cff
    if has actionlint; then actionlint; else say "without actionlint: the shell in workflows is not read"; fi
    ;;
analyzers)
    configure build-lint --buildtype=release "${options[@]}"
    say "analysing"
    python3 tools/lint.py build-lint "${files[@]}"
    ;;
ubsan)
    CC=clang configure build-ubsan --buildtype=debugoptimized -Db_sanitize=undefined -Db_lundef=false \
        "${options[@]}" -Dmpi=disabled \
        -Dc_args='-fsanitize=implicit-conversion,float-cast-overflow -fno-sanitize-recover=all'
    watched build-ubsan --setup asan
    ;;
valgrind)
    # memcheck brings its own allocator, as sanitizers do: programs that count skip themselves.
    configure build-valgrind --buildtype=debugoptimized "${options[@]}" -Dmpi=disabled -Dhwloc=disabled \
        -Dc_args=-DSANITIZED
    T_SCALE=1 watched build-valgrind --setup tsan --timeout-multiplier 20 --wrapper \
        'valgrind --quiet --trace-children=yes --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite --child-silent-after-fork=yes' \
        --suite core --suite serial
    ;;
esac
