#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants random small mistakes in src/ and counts those that the fast suites notice.

example:  tests/mutation/generate.py --jobs 8 --count 300 --keep build-generated/results.jsonl
          tests/mutation/generate.py --again --keep build-generated/results.jsonl

A mutant is one changed operator, bound, constant, statement or pair of arguments. Each is built in a copy of the
tree and run against the fast programs of its suites. It is killed by a failed case, a crash, or a time-out.
One that does not compile, or compiles to the same object, is no mutant and is replaced by another. Each job has a
copy of its own, and the unchanged tree must pass all programs while all jobs run some. Results are
appended to the file of --keep, and a later call with the same seed goes on from there; --again runs its survivors
anew, against the tests of today. Survivors are printed with their lines: each wants a test, or a reason why it
changes nothing."""
import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ["bridge", "comm", "core", "grid", "loss"]  # of src/
# What runs the sources of which mutants. What needs a GPU or UCX, or finds a machine's libraries, is left out.
SUITES = [(r"src/comm/(nccl|direct)/|src/comm/gpu-open", r"fake/"), (r"src/bridge/.*direct", r"(fake|bridge)/"),
          (r"src/bridge/", r"(sockets/)?bridge/|grid/topology"), (r"src/comm/process/", r"sockets/|comm/"),
          (r"src/comm/(?!ucx)", r"(sockets/)?comm/|bridge/(bridge_check|bridge_memory|contract)"),
          (r"src/core/(?!range|backend)", r"core/|comm/|grid/"),
          (r"src/grid/(?!topology-(none|hwloc))", r"(sockets/)?grid/"), (r"src/loss/", r"(sockets/)?loss/")]
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


def ignored(_, names):
    return [n for n in names if n.startswith(("build", ".")) or n.endswith(".pyc")]


class Tree:
    """A copy of the tree with a build of its own."""

    def __init__(self, at, model=None):
        self.at = at
        if model:
            shutil.rmtree(at, ignore_errors=True)
            subprocess.run(["cp", "-a", model.at, at], check=True)
            self.model, self.tests = model.at, model.tests
            return
        shutil.copytree(ROOT, at, ignore=ignored, dirs_exist_ok=True, copy_function=self.refresh)
        if not (at / "build/build.ninja").exists() and self.run(
                ["meson", "setup", "build", "--buildtype=release", "-Dtests=enabled", "-Dtools=auto",
                 "-Dexamples=disabled", "-Dpython=disabled", "-Dmpi=disabled", "-Ducx=disabled", "-Dcuda=disabled",
                 "-Dnccl=disabled"], 600):
            sys.exit(f"generate.py: cannot configure {at}/build")
        if self.build(["build.ninja"]) != 0:  # a tree of an earlier call may know other programs
            sys.exit(f"generate.py: cannot configure {at}/build again")
        self.model = at
        listed = json.loads(subprocess.run(["meson", "introspect", "build", "--tests"], cwd=at, check=True,
                                           capture_output=True).stdout)
        self.tests = {t["name"]: t for t in listed if not {s.split(":")[-1] for s in t["suite"]} & {"slow", "gpu"}
                      and len(t["cmd"]) == 1}

    @staticmethod
    def refresh(source, to):
        if not os.path.exists(to) or pathlib.Path(source).read_bytes() != pathlib.Path(to).read_bytes():
            shutil.copy(source, to)

    def run(self, command, seconds, env=None):
        env = {**os.environ, **{k: v.replace(str(self.model), str(self.at)) for k, v in (env or {}).items()},
               "T_SCALE": "20", "T_SEED": "1", "COLO_TIMEOUT_MS": "5000", "OMP_NUM_THREADS": "1",
               "OPENBLAS_NUM_THREADS": "1"}
        with subprocess.Popen(["nice", "-n", "15", *command], cwd=self.at, env=env, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as p:
            try:
                return p.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, signal.SIGKILL)  # its ranks, too
                return "time-out"

    def build(self, targets, jobs=1):
        return self.run(["ninja", "-C", "build", f"-j{jobs}", *targets], 900)

    def program(self, name):
        """A test's program, from the build folder, of which each copy has its own."""
        return os.path.relpath(self.tests[name]["cmd"][0], self.model / "build")

    def modules(self, name):
        return [str(p.relative_to(self.at / "build")) for p in (self.at / "build/tests/fake").glob("lib*.so*")
                if p.is_file() and not p.is_symlink()] if name.startswith("fake/") else []

    def run_test(self, name):
        return self.run(["build/" + self.program(name)], 40, self.tests[name]["env"])

    def choose(self, jobs, files):
        """{fast program for @files: its seconds}; the unchanged tree must pass them."""
        suites = {next(programs for sources, programs in SUITES if re.match(sources, f)) for f in files}
        names = [n for n in self.tests if any(re.match(programs, n) for programs in suites)]
        if self.build([self.program(n) for n in names], jobs) != 0:
            sys.exit("generate.py: the unchanged tree does not build")
        took = {}

        def one(name):
            begin = time.time()
            code = self.run_test(name)
            took[name] = time.time() - begin
            if code not in (0, 77) and took[name] < FAST:
                print(f"generate.py: the unchanged tree fails {name}, {code}: it is left out", flush=True)
                took[name] = FAST

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, names))
        return {n: s for n, s in took.items() if s < FAST}

    def objects(self):
        """{source: what it compiles to}; the release build has no line numbers in it."""
        return {p.name: hashlib.sha256(p.read_bytes()).digest()
                for of in ("src/libcolo-core.a.p", "tests/fake/libcolobridge-nccl.so.p")
                for p in (self.at / "build" / of).glob("*.o")}

    def verdict(self, file, took, unchanged):
        suites = next(programs for sources, programs in SUITES if re.match(sources, file))
        names = [n for n in took if re.match(suites, n)]
        # what is named like the source is likely to notice
        names.sort(key=lambda n: (pathlib.Path(file).stem.replace("-", "_") not in n, took[n]))
        if self.build(["src/libcolo-core.a", *self.modules(names[0])]) != 0:
            return "does not compile"
        if self.objects() == unchanged:
            return "changes nothing"
        for n in names:
            if self.build([self.program(n), *self.modules(n)]) != 0:
                return "does not compile"
            code = self.run_test(n)
            if code not in (0, 77):
                return n if isinstance(code, int) and code >= 0 else f"{n} ({code})"
        return "survived"


def all_candidates(at, seed, folders):
    choices = [(str(p.relative_to(at)), *c) for f in folders for p in sorted((at / "src" / f).rglob("*.c"))
               if any(re.match(sources, str(p.relative_to(at))) for sources, _ in SUITES) for c in candidates(p)]
    random.Random(seed).shuffle(choices)
    return choices


def survivors(at, done):
    """The kept survivors as candidates, each where its line is today."""
    for r in done:
        lines = (at / r["file"]).read_text().split("\n")
        at_line = min((i for i, line in enumerate(lines) if line.strip() == r["old"]), default=None,
                      key=lambda i, r=r: abs(i + 1 - r["line"]))
        if at_line is None:
            print(f"{r['file']}:{r['line']}: gone: {r['old']}")
        else:
            yield r["file"], at_line, r["kind"], re.match(r"\s*", lines[at_line]).group(0) + r["new"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="mutants in all (300)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice (1)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (1)")
    parser.add_argument("--folder", action="append", help="only this one of src/; repeat for more")
    parser.add_argument("--keep", default="build-generated/results.jsonl", help="results, also of earlier calls")
    parser.add_argument("--again", action="store_true", help="run the kept survivors anew")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after so long")
    args = parser.parse_args()
    begin, lock = time.time(), threading.Lock()
    keep = pathlib.Path(args.keep).resolve()
    keep.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in keep.read_text().splitlines()] if keep.exists() else []
    print("building the programs of the unchanged tree", flush=True)
    trees = [Tree(keep.parent / "tree-0")]
    if args.again:
        choices = list(survivors(trees[0].at, [r for r in done if r["by"] == "survived"]))
    else:
        seen = {tuple(r[k] for k in ("file", "kind", "old", "new")) for r in done}
        choices = all_candidates(trees[0].at, args.seed, args.folder or FOLDERS)
    took = trees[0].choose(args.jobs, {c[0] for c in choices})
    print(f"{len(took)} programs, {time.time() - begin:.0f} s", flush=True)
    unchanged = trees[0].objects()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        trees += pool.map(lambda i: Tree(keep.parent / f"tree-{i}", trees[0]), range(1, args.jobs))
    choices, same = iter(choices), ("file", "kind", "old", "new")

    def work(tree):
        while True:
            with lock:
                real = sum(r["by"] not in NONE for r in done)
                choice = next(choices, None)
                if not choice or (real >= args.count and not args.again) or time.time() - begin > args.minutes * 60:
                    return
            file, line, kind, new = choice
            original = (tree.at / file).read_text()
            lines = original.split("\n")
            was, lines[line] = lines[line], new
            if not args.again and (file, kind, was.strip(), new.strip()) in seen:
                continue
            (tree.at / file).write_text("\n".join(lines))
            by = tree.verdict(file, took, unchanged)
            (tree.at / file).write_text(original)
            with lock:
                result = {"file": file, "line": line + 1, "kind": kind, "old": was.strip(),
                          "new": new.strip()}
                done[:] = [r for r in done if r["by"] != "survived" or any(r[k] != result[k] for k in same)]
                done.append({**result, "by": by})
                keep.write_text("".join(json.dumps(r) + "\n" for r in done))
                print(f"[{sum(r['by'] not in NONE for r in done)}/{args.count}] {file}:{line + 1}: {kind}: {by}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(work, trees))
    real = [r for r in done if r["by"] not in NONE]
    alive = [r for r in real if r["by"] == "survived"]
    print(f"\n{len(real) - len(alive)} of {len(real)} mutants killed "
          f"({100 * (len(real) - len(alive)) / max(len(real), 1):.1f} %); survivors:")
    for r in sorted(alive, key=lambda r: (r["file"], r["line"])):
        print(f"{r['file']}:{r['line']}: {r['kind']}\n    - {r['old']}\n    + {r['new']}")


main()
