# SPDX-License-Identifier: Apache-2.0
"""Runs every row of drill.c on some transports.

example:  tests/faults/drill.py build/tests/faults/drill threads sockets
example:  tests/faults/drill.py build-gpu/tests/gpu/test_gpu_drill peer --row never@forward

Each live rank must get a status that the row allows within the deadline and a second, destroy everything, and sum
on a fresh communicator. COLO_TIMEOUT_MS is the deadline, 500 ms if it is not set. A row in which no deadline may be
over has ten times as long, and its statuses must come within half of that. So the row fails if a rank waits for its
deadline, and not because the machine is busy.

Calls on GPUs are asynchronous. A step's status there is that of its call, or of colo_comm_check() once the stream is
empty. The rank whose deadline is over first gets TIMEOUT and fails the communicator, so other ranks may get PEER. The
rows "order" and "two-threads" run at COLO_CHECK=2, because at 1 only first calls are compared, and the caller does not
wait inside the library. Left out are rows of processes, sockets, signals and address space; and "chunks", because
the stand-in for CUDA has no matrix product."""
import argparse
import concurrent.futures
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

SHORT_MS = int(os.environ.get("COLO_TIMEOUT_MS", 500))
LIMIT = max(60, SHORT_MS * 30 / 1e3)  # of a row, in s
MISMATCH = "COLO_ERR_MISMATCH"
TIMEOUT = "COLO_ERR_TIMEOUT"
PEER = "COLO_ERR_PEER"
NOMEM = "COLO_ERR_NOMEM"
OK = "COLO_OK"
SKIPPED = 77  # the exit status of a job that this machine cannot run
HOST = ("threads", "sockets", "ucx")
GPUS = ("nccl", "peer")  # threads with memory of a GPU: drill_gpu.c
ALL = HOST + GPUS
SOCKETS = ("sockets",)
PROCESSES = ("sockets", "ucx")

# fault@step: (what happens to rank 2, statuses of the other ranks, of rank 2 if it lives, transports)
ROWS = {
    "none": ("nothing", {OK}, {OK}, ALL),
    "never@split": ("never calls split", {TIMEOUT}, {TIMEOUT}, ALL),
    "never@create": ("never creates the bridge", {TIMEOUT}, {TIMEOUT}, ALL),
    "never@forward": ("never comes to a forward", {TIMEOUT}, {TIMEOUT}, ALL),
    "never@backward": ("never comes to a backward", {TIMEOUT}, {TIMEOUT}, ALL),
    "never@destroy": ("does not call destroy until the deadline is over", {OK}, {OK}, ALL),
    "hung@destroy": ("has a device that ends nothing when it destroys what it has", {OK}, {OK}, GPUS),
    "unjoined@destroy": ("destroys a communicator with a sum on its stream that no other rank joins", {OK}, {OK}, ("nccl",)),
    "late@split": ("comes late to split, before the deadline", {OK}, {OK}, ALL),
    "late@forward": ("comes late to a forward, before the deadline", {OK}, {OK}, ALL),
    "leaves@create": ("destroys what it has instead of creating the bridge", {TIMEOUT}, set(), ALL),
    "leaves@forward": ("destroys what it has instead of a forward", {TIMEOUT}, set(), ALL),
    "killed@gather": ("is killed before it brings its address", {TIMEOUT}, None, PROCESSES),
    "killed@workers": ("is killed before it brings UCX's address", {TIMEOUT}, None, ("ucx",)),
    "killed@split": ("is killed before split", {PEER}, None, PROCESSES),
    "killed@create": ("is killed before it creates the bridge", {PEER}, None, PROCESSES),
    "killed@forward": ("is killed before a forward", {PEER}, None, PROCESSES),
    "killed@backward": ("is killed before a backward", {PEER}, None, PROCESSES),
    "killed@destroy": ("is killed when its own job is done, before destroy", {OK, PEER}, None, PROCESSES),
    "killed@leave": ("is killed in the middle of its destroys", {OK, PEER}, None, PROCESSES),
    # UCX 1.13 may then end other processes, too (an assertion in its tcp_ep.c); 1.22 does not.
    "killed@connect": ("is killed after the all-gather of addresses", {PEER}, None, SOCKETS),
    "killed@mid-connect": ("is killed when it has called one rank and not the next", {PEER}, None, SOCKETS),
    "killed@environment": ("is killed when all are connected, in the rest of create", {PEER}, None, PROCESSES),
    "killed-at-work": ("is killed at any moment of the work", {PEER}, None, PROCESSES),
    "exits@forward": ("calls exit(0) before a forward, without destroy", {PEER, "COLO_ERR_ABORTED"}, None, PROCESSES),
    "exits@destroy": ("calls exit(0) without destroy, when its own job is done", {OK, "COLO_ERR_ABORTED"}, None, PROCESSES),
    "stopped-briefly@forward": ("is stopped (SIGSTOP) for less than the deadline", {OK}, {OK}, PROCESSES),
    "stopped@forward": ("is stopped (SIGSTOP) for longer than the deadline", {TIMEOUT}, {TIMEOUT}, PROCESSES),
    "descriptors@world": ("has no descriptors left", {PEER}, {"COLO_ERR_IO"}, PROCESSES),
    # Of threads the whole process has none; tests/faults/test_no_memory.c takes it from one.
    "memory@run": ("has no address space left, and the others are threads of its process", {NOMEM}, {NOMEM}, ("threads",)),
    "memory@world": ("has no address space left", {PEER}, {NOMEM}, SOCKETS),
    "memory@split": ("has no memory left before split", {PEER}, {NOMEM}, PROCESSES),
    "memory@create": ("has no memory left before it creates the bridge", {PEER}, {NOMEM}, PROCESSES),
    "environment@world": ("has COLO_CHECK=3", {PEER}, {"COLO_ERR_ARG"}, PROCESSES),
    "version@world": ("runs another version of the library", {MISMATCH}, {MISMATCH}, PROCESSES),
    "forks": ("forks, and the child uses the communicator", {OK}, {OK}, PROCESSES),
    "fails@register": ("cannot register memory when the others have opened its own", {PEER}, {"COLO_ERR_CUDA"}, ("peer",)),
    "fails@create": ("cannot create the bridge when the others have opened its mailboxes", {PEER}, {"COLO_ERR_CUDA"},
                     ("peer",)),
    "dims@split": ("splits by another dim", {MISMATCH}, {MISMATCH}, ALL),
    "shape@create": ("creates the bridge with another shape", {MISMATCH}, {MISMATCH}, ALL),
    "dtype@create": ("creates it with another dtype", {MISMATCH}, {MISMATCH}, ALL),
    "output@create": ("creates it with another output", {MISMATCH}, {MISMATCH}, ALL),
    "gradient@create": ("creates it with another kind of gradient", {MISMATCH}, {MISMATCH}, ALL),
    "algorithm@create": ("creates it with another algorithm", {MISMATCH}, {MISMATCH}, ALL),
    "layout@create": ("creates it with another layout", {MISMATCH}, {MISMATCH}, ALL),
    "segments": ("has another segment table", {MISMATCH}, {MISMATCH}, ALL),
    "chunks": ("takes another number of tokens per chunk of the loss", {MISMATCH}, {MISMATCH}, HOST),
    "levels": ("has another check level", {MISMATCH}, {MISMATCH}, ALL),
    "order": ("calls backward where the others call forward", {MISMATCH}, {MISMATCH, "COLO_ERR_STATE"}, ALL),
    "one-more": ("runs one step more than the others", {MISMATCH, TIMEOUT}, {MISMATCH, TIMEOUT}, ALL),
    "one-fewer": ("runs one step fewer than the others", {MISMATCH, TIMEOUT}, {MISMATCH, TIMEOUT}, ALL),
    "replicas": ("holds another value than its replica (COLO_CHECK=2)", {"COLO_ERR_CONTRACT"}, {"COLO_ERR_CONTRACT"},
                 ALL),
    "no-samples": ("has no samples, nor has another rank", {OK}, {OK}, ALL),
    "nan": ("holds a NaN", {OK}, {OK}, ALL),
    "aborted": ("is aborted by another thread while the others wait for it", {"COLO_ERR_ABORTED"},
                {"COLO_ERR_ABORTED"}, ALL),
    "two-threads": ("has a second thread that calls while the first waits", {OK}, {"COLO_ERR_STATE"}, ALL),
    "deadline-0": ("asks for a deadline of 0", {TIMEOUT}, {"COLO_ERR_ARG"}, ALL),
    "signals": ("gets a signal every millisecond", {OK}, {OK}, HOST),
    "monitor": ("has a thread that asks for the state every millisecond", {OK}, {OK}, ALL),
    "slow-reader": ("reads 32 bytes at a time, and slowly", {OK}, {OK}, SOCKETS),
    "starved-briefly": ("gets ENOBUFS from every other send()", {OK}, {OK}, SOCKETS),
    "starved@forward": ("gets ENOBUFS from every send()", {TIMEOUT}, {TIMEOUT}, SOCKETS),
    "mute@forward": ("closes its connections for writing", {PEER}, {PEER}, SOCKETS),
    "deaf@forward": ("closes its connections for reading", {PEER}, {PEER}, SOCKETS),
}

# Destroys come back by the deadline, and memory that others have open is freed then.
DESTROYED_BY_DEADLINE = ("never@destroy", "hung@destroy", "unjoined@destroy", "fails@register", "fails@create")

# UCX 1.13 may end a process whose peer dies while they connect over TCP (docs/runtime/processes.md): 5 of 480 times on a busy machine.
UCX_ASSERTION = b"Assertion `!(ep->flags & UCT_TCP_EP_FLAG_CTX_TYPE_TX)' failed"


def is_short(row):
    """Does a status, or what a destroy does, depend on the deadline?"""
    _, others, culprit, _ = ROWS[row]
    return TIMEOUT in others | (culprit or set()) or row in DESTROYED_BY_DEADLINE


def deadline_ms(row):
    return SHORT_MS if is_short(row) else 10 * SHORT_MS


def run(drill, transport, row, tries=4, **more):
    """{rank: [what it said]}, when the fault happened, and the exit status of the job"""
    with tempfile.TemporaryDirectory() as folder:
        command = [drill, transport, row, folder]
        env = dict(os.environ, T_RANKS="threads", COLO_TIMEOUT_MS=str(deadline_ms(row)), **more)
        done = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            said, _ = done.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)  # the ranks, too
            done.communicate()
            raise
        if UCX_ASSERTION in said and tries > 1:
            print(f"again: {row} on {transport}: an assertion of UCX's ended a rank: {UCX_ASSERTION.decode()}")
            return run(drill, transport, row, tries - 1, **more)
        if done.returncode == SKIPPED:
            return {}, None, SKIPPED
        at = pathlib.Path(folder, "fault")
        said = {int(p.name): [json.loads(line) for line in p.read_text().splitlines()]
                for p in pathlib.Path(folder).iterdir() if p.name.isdigit()}
        return said, float(at.read_text()) if at.exists() and at.read_text() else None, done.returncode


def judge(row, said, fault, transport):
    """(complaints, seconds from the fault to the last status)"""
    _, others, culprit, _ = ROWS[row]
    wrong, slowest, firsts = [], 0.0, set()
    most = deadline_ms(row) / 1e3 + 1 if is_short(row) else deadline_ms(row) / 2e3
    for rank in range(4):
        allowed = culprit if rank == 2 else others
        if transport in GPUS and allowed and TIMEOUT in allowed:
            allowed = allowed | {PEER}
        if allowed is None:
            continue
        lines = said.get(rank, [])
        first = next((s for s in lines if s["call"] not in ("destroy", "fresh")), None)
        if allowed and not first:
            wrong.append(f"rank {rank} said nothing")
            continue
        if allowed:
            firsts.add(first["status"])
        if first and first["status"] not in (allowed or {OK}):
            wrong.append(f"rank {rank}: {first['call']}: {first['status']} ({first['error']})")
        if first and first["status"] != OK:
            late = first["end"] - max(fault or 0, first["begin"] if fault is None else 0)
            if row in ("stopped@forward", "aborted") and rank == 2:
                continue  # it slept
            slowest = max(slowest, late)
            if late > most:
                wrong.append(f"rank {rank}: {first['call']} took {late:.2f} s")
        for s in lines:
            if s["call"] == "destroy" and s["end"] - s["begin"] > most:
                wrong.append(f"rank {rank}: destroy took {s['end'] - s['begin']:.2f} s")
        fresh = [s for s in lines if s["call"] == "fresh"]
        if not fresh or fresh[-1]["status"] != OK:
            wrong.append(f"rank {rank}: fresh communicator: {fresh[-1]['error'] if fresh else 'never made'}")
    if transport in GPUS and firsts == {PEER}:
        wrong.append("every rank says that another one failed")
    return wrong, slowest


NAMES = {"threads": "threads", "sockets": "processes, Unix sockets", "ucx": "processes, two nodes: UCX between",
         "nccl": "threads, GPU memory: NCCL", "peer": "threads, GPU memory: peers"}


def plural(names):
    return " or ".join(f"`{n.removeprefix('COLO_ERR_').removeprefix('COLO_')}`" for n in sorted(names))


def page(results):
    """docs/runtime/faults.md; with no results its rows without times."""
    lines = ["# Faults: what each rank gets, and when", "",
             "<!-- made by tests/faults/drill.py --page; do not edit -->", "",
             "Each row was run on four ranks: rank 2 is at fault. The deadline (`COLO_TIMEOUT_MS`) is 500 ms if a status depends",
             "on it, else 5 s. Each live rank must get one of the stated statuses: within the deadline and 1 s if the deadline",
             "is 500 ms, else within 2.5 s. Then it destroys all its objects and sums with the other live ranks on a new",
             "communicator. A row that fails fails the test suite. The times are the longest from the fault to the status,",
             "in ms. Where no status is an error, there is no time.", "",
             "Ranks of `mpirun` are such processes ([MPI](processes.md#mpi)). Most launchers end the whole job if a rank is killed; a",
             "rank that they let live gets the status of the table.", "",
             "The last two columns are of threads with memory of a GPU each: over NCCL, and over registered memory of",
             "peers. Their times were measured on a stand-in for CUDA and NCCL on the processor (`tests/fake`), and are not",
             "those of GPUs; `tools/gpu-test.sh` runs the same rows on GPUs. Their calls are asynchronous: a rank gets a",
             "status from the call, or from `colo_comm_check()` once its stream is empty. Where the table says `TIMEOUT`, the",
             "rank whose deadline is over first gets that, and the others may get `PEER`. `order` and `two-threads` run at",
             "`COLO_CHECK=2` there. In `fails@register` and `fails@create` the ranks open each other's memory as processes do,",
             "which only the stand-in allows to threads; no rank may free what another one has open.", "",
             "The faults are in [drill.c](../../tests/faults/drill.c), what they must lead to is in",
             "[drill.py](../../tests/faults/drill.py), both under the name of the row; `drill.py --row NAME` repeats one.",
             "[comm](comm.md) says what holds after an error. What GPU communicators do if a call of CUDA or NCCL, an",
             "allocation or a thread fails, and what a broken device, a capture on one rank or a borrowed `ncclComm_t` that",
             "ended leads to, is in [test_faults.c](../../tests/fake/test_faults.c), with the statuses of all ranks;",
             "[test_no_memory.c](../../tests/faults/test_no_memory.c) lets each allocation and each thread fail in turn;",
             "[test_abort.c](../../tests/comm/test_abort.c) aborts a hundred worlds in a row, after which a process holds no more",
             "descriptors, threads or memory than before.", "",
             "| row | rank 2 … | the others get | rank 2 gets | " + " | ".join(NAMES[t] for t in ALL) + " |",
             "|---|---|---|---|" + "---:|" * len(ALL)]
    for row, (what, others, culprit, transports) in ROWS.items():
        cells = [f"`{row}`", what, plural(others), "-" if culprit is None else plural(culprit) or "nothing"]
        for t in ALL:
            done = results.get(t, {}).get(row)
            cells.append("" if t not in transports or not done or not done["seconds"] else f"{done['seconds'] * 1e3:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def one_row(args, transport, row):
    """(what the ranks said, None: it was skipped; complaints; seconds)"""
    drill, env = args.drill, {}
    if args.gpus and transport in GPUS:
        drill, env = args.gpus, {"COLO_BACKEND_DIR": str(pathlib.Path(args.gpus).parent)}
    try:
        said, fault, status = run(drill, transport, row, **env)
    except subprocess.TimeoutExpired:
        return {}, [f"it hangs: ended after {LIMIT} s"], LIMIT
    if status == SKIPPED:
        return None, [], 0.0
    wrong, seconds = judge(row, said, fault, transport)
    return said, wrong + [f"exit status {status}"] * (status != 0), seconds


def rows_of(text):
    """A page without its times."""
    return [line.split(" | ")[:4] for line in text.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drill")
    parser.add_argument("transports", nargs="+", choices=ALL)
    parser.add_argument("--gpus", metavar="DRILL", help="the program for nccl and peer, if another; next to its backends")
    parser.add_argument("--jobs", type=int, default=1, help="rows to run at a time; 1")
    parser.add_argument("--row", action="append", help="this one only; repeat for more")
    parser.add_argument("--without", action="append", default=[], metavar="FAULT", help="not the rows of this one")
    parser.add_argument("--page", metavar="FILE", help="write docs/runtime/faults.md with the times of this run, if no row fails")
    parser.add_argument("--check-page", metavar="FILE", help="fail if FILE has other rows than this drill")
    args = parser.parse_args()
    jobs = [(transport, row) for transport in args.transports for row, (_, _, _, transports) in ROWS.items()
            if transport in transports and (not args.row or row in args.row) and row.split("@")[0] not in args.without]
    results, passed, failed = {}, 0, 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for (transport, row), (said, wrong, seconds) in zip(jobs, pool.map(lambda job: one_row(args, *job), jobs)):
            if said is None:
                print(f"skipped  {row} on {transport}", flush=True)
                continue
            results.setdefault(transport, {})[row] = {"seconds": seconds}
            statuses = sorted({s["status"] for r, lines in said.items() for s in lines
                               if r != 2 and s["call"] not in ("destroy", "fresh")})
            print(f"{'FAILED' if wrong else 'ok'}  {row} on {transport}: {', '.join(statuses)} after {seconds:.2f} s",
                  *wrong, sep="\n    ", flush=True)
            failed += bool(wrong)
            passed += not wrong
    if passed + failed == 0:
        return SKIPPED
    if args.page and not failed:
        pathlib.Path(args.page).write_text(page(results))
    if args.check_page and rows_of(pathlib.Path(args.check_page).read_text()) != rows_of(page({})):
        print(f"FAILED  {args.check_page} has other rows than the drill; make it again with --page")
        failed += 1
    print(json.dumps({"passed": passed, "failed": failed, "ok": not failed}))
    return failed > 0


sys.exit(main())
