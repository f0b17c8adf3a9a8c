# SPDX-License-Identifier: Apache-2.0
"""Runs gcc -fanalyzer, clang-tidy and cppcheck over src/ and tools/; lint.sh prepares and calls it.

usage: lint.py BUILD-FOLDER [FILE...]

A source is analysed again if it, a header or a rule is newer than its last result. A remark that a line of
lint-suppressions.txt names is left out; a line that matches nothing any more is a remark itself."""
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RULES = [ROOT / ".clang-tidy", ROOT / "tools/lint.h", pathlib.Path(__file__)]
SUPPRESSIONS = ROOT / "tools/lint-suppressions.txt"
REMARK = re.compile(r"(\S+?):(\d+):\d+: (?:warning|error): (.*) \[-?([\w.,=+-]+)\]$")
INCLUDES = [f"-I{ROOT / d}" for d in ("src", "include", "tools")]
GCC = ["gcc", "-c", "-o", "/dev/null", "-O1", "-UNDEBUG", "-fanalyzer", "-Woverride-init", "-Wlogical-op",
       "-Wduplicated-cond", "-Wformat-overflow=2", "-Wno-unused", "-fdiagnostics-color=never"]
CPPCHECK = ["cppcheck", "--quiet", "--std=c11", "--library=posix,gnu", "--enable=warning,portability",
            "--template={file}:{line}:{column}: warning: {message} [{id}]", "-D_GNU_SOURCE", *INCLUDES]


def sources(build):
    """{file: its include paths and definitions} of what the library and the tools are made of."""
    found = {}
    for c in json.loads((build / "compile_commands.json").read_text()):
        name = os.path.relpath(build / c["file"], ROOT)
        if re.match(r"(src|tools)/(?!cuda/|comm/nccl/|comm/direct/).*\.c$", name):  # CUDA's headers hide too much
            words = shlex.split(c["command"])
            found[name] = [w for w in words if re.match("-I|-D|-std|-pthread", w)]
            found[name] += [w for i, x in enumerate(words) if x == "-isystem" for w in words[i:i + 2]]
    return found


def analyse(name, flags, build):
    """[[file, line, rule, text]]"""
    first = [] if name == "src/core/error.c" else ["-include", str(ROOT / "tools/lint.h")]
    extra = [f"--extra-arg={f}" for f in ["-UNDEBUG", *INCLUDES, *first]]
    path, remarks = str(ROOT / name), []
    for command in ([*GCC, *flags, *INCLUDES, *first], ["clang-tidy", "-p", build, "--quiet", *extra], CPPCHECK):
        done = subprocess.run([*command, path], cwd=build, text=True, check=False, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        for line in done.stdout.splitlines():
            m = REMARK.match(line)
            if m and not os.path.relpath(build / m[1], ROOT).startswith(".."):
                remarks.append([os.path.relpath(build / m[1], ROOT), int(m[2]), m[4].removeprefix("W"), m[3]])
            elif " error: " in line:
                remarks.append([name, 0, command[0], line])
    return remarks


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    every = sources(build)
    wanted = {n: f for n, f in every.items() if not sys.argv[2:] or n in sys.argv[2:]}
    headers = [p for d in ("src", "include", "tools", "kernels") for p in (ROOT / d).rglob("*.h")]
    newest = max(p.stat().st_mtime for p in [*RULES, *headers])
    results, stale = {}, []
    for name in wanted:
        kept = build / "lint" / (name.replace("/", "+") + ".json")
        if kept.exists() and kept.stat().st_mtime > max(newest, (ROOT / name).stat().st_mtime):
            results[name] = json.loads(kept.read_text())
        else:
            stale.append((name, kept))
    (build / "lint").mkdir(exist_ok=True)
    last = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [(name, kept, pool.submit(analyse, name, wanted[name], build)) for name, kept in stale]
        for i, (name, kept, job) in enumerate(jobs):
            results[name] = job.result()
            kept.write_text(json.dumps(results[name]))
            if time.monotonic() - last > 10:
                last = time.monotonic()
                print(f"   {i + 1} of {len(jobs)} files", flush=True)

    used, left = collections.Counter(), set()
    lines = [l.split(maxsplit=2) for l in SUPPRESSIONS.read_text().splitlines() if l and l[0] != "#"]
    for file, line, rule, text in {tuple(r) for found in results.values() for r in found}:
        hits = [i for i, (r, f, _) in enumerate(lines) if r == rule and f in ("*", file)]
        used.update(hits)
        if not hits:
            left.add((file, line, rule, text))
    for file, line, rule, text in sorted(left):
        print(f"{file}:{line}: {text} [{rule}]")
    unused = [l for i, l in enumerate(lines) if not used[i]] if len(wanted) == len(every) else []
    for rule, file, _ in unused:
        print(f"lint-suppressions.txt: {rule} {file}: nothing is left out by this line; drop it")
    print(f"{len(wanted)} files, {len(stale)} analysed now; {len(left) + len(unused)} remarks, "
          f"{sum(used.values())} left out by {len(lines)} rules")
    return bool(left or unused)


sys.exit(main())
