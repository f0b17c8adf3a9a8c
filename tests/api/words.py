#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lists the private words that are left in the tree, and what to say instead.

    python3 tests/api/words.py [ROOT]

A private word is one that no manual of MPI, NCCL, CUDA or PyTorch uses for the thing. NEWS.md lists
old names and bench/results/ keeps what was measured under them: both are left out. Exit code 1 if a
word is found. The program first finds words that it writes itself, so that it cannot pass blindly.
"""
import re
import shutil
import subprocess
import sys
from pathlib import Path

# (what is searched, what to say instead, paths where it is searched)
EVERYWHERE = r"."
WORDS = [
    (r"fates?|doom(ed|s)?|tear_main", "error state, set_error, abort", EVERYWHERE),
    (r"seal(s|ed|ing)?", "set the error", EVERYWHERE),
    (r"zombies?|stash(ed)?", "draining group, unexpected message", EVERYWHERE),
    (r"hubs?", "shared state", EVERYWHERE),
    (r"wires?|cards?", "transport, endpoint", r"^(src|include|tests/(comm|mpi))/"),
    (r"nctx|nfamily|families|(?<!manager_)ctx", "context, group", r"^(src|include)/"),
    (r"slabs?|shaped", "partial sum, shape state", r"^(src/bridge|include|docs)/"),
    (r"needers?|holders?", "destination, source", EVERYWHERE),
    (r"lopsided|unsettled|settled?", "asymmetric, agree", EVERYWHERE),
    (r"melt(s|ed|ing)?", "coalesce", EVERYWHERE),
    (r"ledgers?|knobs?", "statistics, environment variable", EVERYWHERE),
    (r"sentences?|sayings?", "error message", EVERYWHERE),
    (r"twins?|yardsticks?|ladders?", "mutant, baseline, kernel variants", EVERYWHERE),
    (r"nobody|whoever|who", "the rank, the caller, no rank", EVERYWHERE),
    (r"gave_up|look_(at|again)|hear_(answer|guest)|cap_say|say_(what|fault|find)|said_t", "timed out, check, report", EVERYWHERE),
    (r"scratch", "workspace", EVERYWHERE),
    (r"(?<!no )(?<!left )(?<!make )rooms?(?! for| to)", "workspace, memory, capacity", EVERYWHERE),
    (r"(?<!__)slots?(?!__)", "vector, entry, index; a slot is a rank's part of what threads share",
     r"^(?!src/comm/threads/|docs/comm\.md|tests/mutation/)"),
    (r"rounds?(?=\[)|colo_rounds?_\w*|(?<=->)rounds?|(?<=struct )round", "step, repetition", EVERYWHERE),
    (r"beside|colo_beside\w*", "concurrent, next to, compared with, the other losses", EVERYWHERE),
    (r"(?<=->)levels?|(?<=\w\.)levels?(?= =|[,;)\]])", "addend", r"^(src/bridge|include|python|tools/plan|kernels)/"),
    (r"(?<=->)at|(?<=int(?:64|32)_t )at(?!_most)|(?<=size_t )at(?!_most)|(?<= int )at|(?<=span )at", "offset, index, position",
     r"^(src|include|kernels|tools)/"),
    (r"n?kept(?=\[|->|\.[a-z])", "saved, the thing that is saved", r"^(src|include|kernels)/"),
    (r"(?<=collective )way|(?<=->)way|(?<=int )way", "pass, direction, method", r"^(src|include|tools|docs)/"),
    (r"promises?", "declared precondition, contract", EVERYWHERE),
    (r"COLO_OWNER(?!SHIP)\w*|colo_owner(?!ship)\w*|colo_way\w*|colo_place_\w*|colo_pick\w*", "category, pass, topology, topk", EVERYWHERE),
    (r"is_direct|direct(?= (call|path)s?)|(?<=not )direct", "p2p, peer-to-peer", EVERYWHERE),
    (r"colo_lane\w*|colo_step_lane|colo_late|COLO_K_LATE", "messages, auxiliary stream, abandoned, timeout", EVERYWHERE),
    (r"guard (of|thread)|(?<=the )guard(?= looks)", "watchdog, check", EVERYWHERE),
]
# Names in C, C++ and CUDA: comments and strings are plain English, where these words may stand.
NAMES = [
    (r"direct", "p2p, in place", EVERYWHERE),
    (r"n?posts", "exposed ranks", r"^(src|kernels|include|tools)/"),
    (r"(?<!dtype\.)lanes?", "messages, peer step, auxiliary stream", r"^(?!kernels/|examples/captioner/cuda/|tests/core/dlpack_abi)"),
    (r"(take_)?turns?", "poll, case, repetition, rotation", EVERYWHERE),
    (r"(is_)?late", "abandoned, timeout, relayed", r"^(src|kernels|include|tools|tests/harness)/"),
    (r"mark_?", "sentinel, count, bound", EVERYWHERE),
    (r"guard", "check, watchdog", r"^(src|kernels|include|tools)/"),
    (r"tear|untold|news|meet(_blocks)?|look|pick|ways?|spread_\w+|\w+_say_\w+",
     "abort, notify, intersect, barrier, lookup, part, broadcast, print", r"^(src|kernels|include|tools)/"),
    (r"pieces?(_t)?", "part; a packing cuts sequences into pieces", r"^(src|kernels|include|tools)/(?!.*(pack|segments|tables|bars))"),
]
LEFT_OUT = re.compile(r"^(NEWS\.md|LICENSE|bench/results/|tests/api/words\.py)|\.(gz|csv|png|svg|xml)$")


def finder(pattern):
    # parts of snake_case names count as words, too
    return re.compile(r"(?<![A-Za-z0-9])(" + pattern + r")(?![A-Za-z0-9])", re.IGNORECASE)


RULES = [(finder(p), say, re.compile(paths)) for p, say, paths in WORDS]
ANY = finder("|".join(p for p, _, _ in WORDS))  # one search tells that most files have none
NAME_RULES = [(re.compile(r"(?<!\w)(" + p + r")(?!\w)"), say, re.compile(paths)) for p, say, paths in NAMES]
SOURCE = re.compile(r"\.(c|h|cu|cuh)$")
PROSE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def findings(path, text):
    names = PROSE.sub(lambda m: re.sub(r"[^\n]", " ", m.group(0)), text) if SOURCE.search(path) else ""
    for rules, where in ((RULES if ANY.search(text) else [], text), (NAME_RULES, names)):
        for rule, say, paths in rules:
            if not paths.search(path):
                continue
            for m in rule.finditer(where):
                yield where.count("\n", 0, m.start()) + 1, m.group(1), say


def finds_planted_words():
    planted = {"src/a.c": "x->colo_slab_of = w->at; /* nobody's turn */ turn(lane, \"turn\");",
               "docs/a.md": "The ledger counts, in turn."}
    return [w for p, t in planted.items() for _, w, _ in findings(p, t)] == ["nobody", "at", "lane", "turn", "ledger"]


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    if not finds_planted_words():
        print("words: the search does not find what it should")
        return 1
    listed = shutil.which("git") and subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True,
                                                    check=False)
    if listed and listed.returncode == 0:
        names = listed.stdout.split("\n")
    else:  # sources of an archive, with what was built and drawn among them
        files = (p.relative_to(root) for p in root.rglob("*") if p.is_file())
        names = [str(p) for p in files if not p.parts[0].startswith(("build", "report.html"))]
    n = 0
    for name in sorted(filter(None, names)):
        if LEFT_OUT.search(name) or not (root / name).is_file():
            continue
        try:
            text = (root / name).read_text()
        except UnicodeDecodeError:
            continue
        for line, word, say in findings(name, text):
            print(f"{name}:{line}: {word}; say: {say}")
            n += 1
    print(f"private words left: {n}")
    return n > 0


sys.exit(main())
