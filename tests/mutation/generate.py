#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants random small mistakes in src/ and counts those that the fast suites notice.

example:  tests/mutation/generate.py --count 300 --keep build-generated/results.jsonl

A mutant is one changed operator, bound, constant, statement or pair of arguments. Each is built in a copy of the
tree and run against the fast programs of its suite. It is killed by a failed case, a crash, or a time-out.
One that does not compile, or compiles to the same object, is no mutant and is replaced by another. Results are
appended to the file of --keep, and a later call with the same seed goes on from there. Survivors are printed with
their lines: each wants a test, or a reason why it changes nothing."""
import argparse
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ["bridge", "comm", "core", "grid", "loss"]  # of src/; its mutants run the suite of that name
NONE = ("does not compile", "changes nothing")
FAST = 20.0  # seconds that a program may take on the unchanged tree
SWAPS = [(r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "), (r" == ", " != "), (r" != ", " == "),
         (r" && ", " || "), (r" \|\| ", " && "), (r" \+ ", " - "), (r" - ", " + "), (r" \* (?=\w)", " + "),
         (r" / ", " * "), (r" % ", " / "), (r"\+\+", "--"), (r" \+= ", " -= "), (r" - 1\b", ""), (r" \+ 1\b", ""),
         (r"\b0\b", "1"), (r"\b1\b", "2"), (r"\btrue\b", "false"), (r"\bfalse\b", "true"), (r"(?<=[( ])!(?=\w)", ""),
         (r"\((\w+), (\w+)\)", r"(\2, \1)")]
# Lines that only speak, or that no program can see.
LEFT_OUT = re.compile(r'^\s*(#|/\*|\*|//|"|\}|case |static const char)|colo_fail|colo_log|snprintf|put\(|AUTOFREE'
                      r"|typedef|struct \w+ \{|^\w|COLO_TRY_GOTO|pthread|__attribute__")


def candidates(path):
    """(line number, kind, changed line) of every possible mutant of a file."""
    lines, inside, comment = path.read_text().split("\n"), 0, False
    for i, line in enumerate(lines):
        starts = re.search(r"colo_fail\w*\(|snprintf\(|colo_log\(", line)
        if inside or starts:  # a message, up to its semicolon
            inside = 0 if line.rstrip().endswith(";") else 1
            continue
        if comment or "/*" in line and "*/" not in line:
            comment = "*/" not in line
            continue
        if LEFT_OUT.search(line) or not line.startswith("    "):
            continue
        code = line.split("/*")[0]
        for pattern, to in SWAPS:
            for m in re.finditer(pattern, code):
                if '"' not in code[:m.start()]:
                    yield i, f"{m.group(0)} -> {m.expand(to)}", code[:m.start()] + m.expand(to) + code[m.end():]
        if re.match(r"\s+[\w>\[\].*()-]+ [-+|*]?= .*;$", code) and not re.match(r"\s+(const |u?int|size_t|double|float|bool|char)", code):
            yield i, "statement dropped", re.match(r"\s*", code).group(0) + ";"


class Tree:
    """A copy of the tree with a build of its own."""

    def __init__(self, at):
        self.at = at
        if not (at / "build" / "build.ninja").exists():
            shutil.rmtree(at, ignore_errors=True)
            shutil.copytree(ROOT, at, ignore=shutil.ignore_patterns("build*", ".git", "*.pyc"))
            if self.run(["meson", "setup", "build", "--buildtype=release", "-Dtests=enabled", "-Dtools=disabled",
                      "-Dexamples=disabled", "-Dpython=disabled", "-Dcuda=disabled", "-Dnccl=disabled"], 600):
                sys.exit(f"generate.py: cannot configure {at}/build")
        listed = json.loads(subprocess.run(["meson", "introspect", "build", "--tests"], cwd=at, check=True,
                                           capture_output=True).stdout)
        self.tests = {t["name"]: t for t in listed if not {s.split(":")[-1] for s in t["suite"]} & {"slow", "gpu"}}

    def run(self, command, seconds, env=None):
        env = {**os.environ, **(env or {}), "T_SCALE": "20", "T_SEED": "1", "COLO_TIMEOUT_MS": "5000",
               "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            return subprocess.run(["nice", "-n", "15", *command], cwd=self.at, env=env, timeout=seconds, capture_output=True, check=False,
                                  stdin=subprocess.DEVNULL).returncode
        except subprocess.TimeoutExpired:
            return "time-out"

    def build(self, programs):
        return self.run(["ninja", "-C", "build", *(self.tests[p]["cmd"][-1] for p in programs)], 900)

    def run_test(self, name):
        t = self.tests[name]
        return self.run(["build/" + t["cmd"][-1]], 60, t["env"])

    def choose(self, folder):
        """The fast programs of a suite, fastest first; the unchanged tree must pass them."""
        names = [n for n, t in self.tests.items() if n.startswith(folder + "/") and t["cmd"][-1].endswith(".run")]
        if self.build(names) != 0:
            sys.exit(f"generate.py: the unchanged tree does not build {folder}")
        took = {}
        for n in names:
            begin = time.time()
            code = self.run_test(n)
            took[n] = time.time() - begin
            if code not in (0, 77):
                sys.exit(f"generate.py: the unchanged tree fails {n}: {code}")
        return sorted((n for n in names if took[n] < FAST), key=took.get)

    def objects(self):
        """{source: what it compiles to}; the release build has no line numbers in it."""
        at = self.at / "build/src/libcolo-core.a.p"
        return {p.name[:-2]: hashlib.sha256(p.read_bytes()).digest() for p in at.glob("*.o")}

    def verdict(self, programs, unchanged):
        if self.build(programs) != 0:
            return "does not compile"
        if self.objects() == unchanged:
            return "changes nothing"
        return next((p for p in programs if self.run_test(p) not in (0, 77)), "survived")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="mutants in all (300)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice (1)")
    parser.add_argument("--folder", action="append", choices=FOLDERS, help="only this one; repeat for more")
    parser.add_argument("--keep", default="build-generated/results.jsonl", help="results, also of earlier calls")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after so long")
    args = parser.parse_args()
    folders = args.folder or FOLDERS
    keep = pathlib.Path(args.keep).resolve()
    keep.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in keep.read_text().splitlines()] if keep.exists() else []
    tree = Tree(keep.parent / "tree")
    print("building the programs of the unchanged tree", flush=True)
    programs = {folder: tree.choose(folder) for folder in folders}
    unchanged = tree.objects()
    choices = [(f, str(p.relative_to(tree.at)), *c) for f in folders for p in sorted((tree.at / "src" / f).rglob("*.c"))
               if not re.search(r"src/comm/(nccl|peer|mpi)|gpu|topology-none", str(p)) for c in candidates(p)]
    random.Random(args.seed).shuffle(choices)
    seen = {(r["file"], r["line"], r["kind"], r["new"]) for r in done}
    begin = time.time()
    for folder, file, line, kind, new in choices:
        real = [r for r in done if r["by"] not in NONE]
        if len(real) >= args.count or time.time() - begin > args.minutes * 60:
            break
        if (file, line + 1, kind, new.strip()) in seen:
            continue
        at = tree.at / file
        original = at.read_text()
        lines = original.split("\n")
        was, lines[line] = lines[line], new
        at.write_text("\n".join(lines))
        by = tree.verdict(programs[folder], unchanged)
        at.write_text(original)
        done.append({"file": file, "line": line + 1, "kind": kind, "old": was.strip(), "new": new.strip(), "by": by})
        with keep.open("a") as f:
            f.write(json.dumps(done[-1]) + "\n")
        print(f"[{len(real) + 1}/{args.count}] {file}:{line + 1}: {kind}: {by}", flush=True)
    real = [r for r in done if r["by"] not in NONE]
    alive = [r for r in real if r["by"] == "survived"]
    print(f"\n{len(real) - len(alive)} of {len(real)} mutants killed "
          f"({100 * (len(real) - len(alive)) / max(len(real), 1):.1f} %); survivors:")
    for r in sorted(alive, key=lambda r: (r["file"], r["line"])):
        print(f"{r['file']}:{r['line']}: {r['kind']}\n    - {r['old']}\n    + {r['new']}")


main()
