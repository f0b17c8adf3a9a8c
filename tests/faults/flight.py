# SPDX-License-Identifier: Apache-2.0
"""flight.py PROGRAM TIMELINE PACKAGE [--analyzer]: runs each row of flight_rows.c and judges the files that ranks wrote,
as `colobridge flight` of the folder PACKAGE makes them for PyTorch, and what that says by itself.

Without --analyzer the judge is this file: it compares the entries of the ranks of each group, number by number.
With --analyzer it is PyTorch's own; exit 77 where the installed torch has none (2.9 and later do)."""
import ast
import contextlib
import io
import json
import logging
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile

# row -> (ranks at fault, the first operation that is not alike, its number in its group, transports)
ROWS = {
    "healthy": (set(), None, None, ["threads", "sockets"]),
    "wrapped": (set(), None, None, ["threads", "sockets"]),
    "missing": ({2}, "all_gather", 4, ["threads", "sockets"]),
    "killed": ({2}, "all_gather", 4, ["sockets"]),
    "exits": ({2}, "all_gather", 4, ["sockets"]),
    "another-kind": ({1}, "all_gather", 4, ["threads", "sockets"]),
    "another-count": ({1}, "broadcast", 4, ["threads", "sockets"]),
    "another-dtype": ({3}, "all_gather", 4, ["threads", "sockets"]),
    "one-fewer": ({0}, "all_gather", 4, ["threads", "sockets"]),
    "group": ({3}, "all_reduce", 2, ["threads", "sockets"]),
}
KEYS = {"record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id", "profiling_name",
        "time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "state",
        "time_discovered_started_ns", "time_discovered_completed_ns", "retired", "timeout_ms", "is_p2p", "frames"}


def run(program, row, transport, folder):
    env = dict(os.environ, COLO_FLIGHT_RECORDER=f"{folder}/rank", T_RANKS=transport)
    subprocess.run([program, row], env=env, timeout=60, check=False, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)


def convert(package, *arguments):
    """Status and output of colobridge flight."""
    sys.path.insert(0, package)
    from colobridge.flight import main as command
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = command([*map(str, arguments)])
    return status, said.getvalue()


def check_summary(package, files, dumps, expected):
    """The command names the operation and its number, and the ranks at fault as those that differ from the most."""
    (bad, op, seq), (status, said) = expected, convert(package, *files)
    assert status == bool(bad), said
    for rank in dumps:
        assert f"rank {rank}, process {dumps[rank]['comms'][0]['pid']} on " in said, said
    if bad and bad.isdisjoint(dumps):
        assert f"no record of rank {min(bad)}\n" in said and f"{op} of 16 f32 #{seq} did not end well" in said, said
    elif bad:
        line, = (line for line in said.splitlines() if "differs" in line)
        assert f": operation {seq} differs: {op} of " in line and line.endswith(f" on rank {min(bad)}"), said


def judge(dumps, row):
    """(ranks at fault, operation, its number), from the entries alone."""
    expected = {2} if row == "killed" else set()
    assert set(dumps) == set(range(4)) - expected, f"files of {sorted(dumps)}"
    groups = {}
    for rank, dump in dumps.items():
        assert dump["version"] == "2.10"
        ids = [e["record_id"] for e in dump["entries"]]
        assert ids == list(range(ids[0], ids[0] + len(ids))) and len(ids) <= 256
        assert (len(ids) == 256) == (row == "wrapped")
        assert ids[0] == dumps[0]["entries"][0]["record_id"]
        for name, group in dump["pg_config"].items():
            assert groups.setdefault(name, ranks := ast.literal_eval(group["ranks"])) == ranks
        for entry in dump["entries"]:
            assert set(entry) >= KEYS and entry["process_group"][0] in dump["pg_config"]
            assert (entry["state"] == "completed") == (entry["time_discovered_completed_ns"] is not None)
    if expected:  # a rank without a file is at fault, in what the others did not complete
        left = [e for d in dumps.values() for e in d["entries"] if e["state"] != "completed"]
        return expected, left[0]["profiling_name"].split(":")[1], left[0]["collective_seq_id"]
    for name, ranks in sorted(groups.items(), key=lambda g: len(g[1])):
        said = {r: {e["collective_seq_id"]: e for e in dumps[r]["entries"] if e["process_group"][0] == name}
                for r in ranks if r in dumps}
        first = max((min(s) for s in said.values() if s), default=1)
        for seq in range(first, max((max(s) for s in said.values() if s), default=0) + 1):
            alike = {}
            for r in ranks:
                e = said.get(r, {}).get(seq)
                what = e and (e["profiling_name"], str(e["input_sizes"]), str(e["input_dtypes"]))
                alike.setdefault(what, set()).add(r)
            if len(alike) > 1:
                most = max((w for w in alike if w), key=lambda w: len(alike[w]))
                bad = set().union(*(alike[w] for w in alike if w != most))
                return bad, most[0].split(":")[1], seq
    return set(), None, None


def check_timeline(tool, dumps, files):
    """Each operation is drawn once, and those without an end are marked."""
    drawn = json.loads(subprocess.run([sys.executable, tool, *files], check=True, capture_output=True).stdout)
    bars = [e for e in drawn["traceEvents"] if e["ph"] == "X"]
    ops = [op for d in dumps.values() for comm in d["comms"] for op in comm["ring"]]
    assert len(bars) == len(ops) and all(b["dur"] >= 0 for b in bars)
    assert sum("unfinished" in b["name"] for b in bars) == sum(op["status"] != "COLO_OK" for op in ops)


def refuse_broken_files(tool, package):
    """What is no flight record is refused in one line, and nothing is written."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = pathlib.Path(folder, "rank0"), pathlib.Path(folder, "out")
        for content in b"", b"\x80\x02}.", b"null", b"[]", b"{}", b'{"ended":0,"comms":[]}', b'{"ended":0,"comms":[{}]}':
            path.write_bytes(content)
            done = subprocess.run([sys.executable, tool, str(path)], capture_output=True, text=True)
            assert done.returncode == 1 and done.stderr.startswith("timeline: "), (content, done.stderr)
            assert done.stderr.count("\n") == 1, (content, done.stderr)
            status, said = convert(package, path, "-o", out)
            assert status == 2 and said.startswith(f"flight: {path}: ") and said.count("\n") == 1, (content, said)
            assert not out.exists()
        done = subprocess.run([sys.executable, "-B", "-m", "colobridge", "flight", str(path)], capture_output=True,
                              text=True, env=dict(os.environ, PYTHONPATH=package))
        assert (done.returncode, done.stdout) == convert(package, path) and not done.stderr


def analyze(folder, row):
    """What PyTorch's analyzer prints."""
    from torch.distributed.flight_recorder import fr_trace
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    loggers = [logging.getLogger(n) for n in logging.root.manager.loggerDict if "light" in n] + [logging.root]
    for logger in loggers:
        logger.addHandler(handler)
    args = [str(folder), "-p", "rank"] + (["--allow-incomplete-ranks"] if row == "killed" else [])
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        fr_trace.main(args)
    for logger in loggers:
        logger.removeHandler(handler)
    return out.getvalue()


# If operations differ, the analyzer takes the rank whose file it read first to be right.
ANALYZER_SAYS = {
    "healthy": [], "wrapped": [],
    "missing": ["nccl:all_gather", "missing ranks: {2}", "sequence number: 4"],
    "one-fewer": ["nccl:all_gather", "missing ranks: {0}", "sequence number: 4"],
    "group": ["nccl:all_reduce", "missing ranks: {3}", "sequence number: 2"],
    "killed": ["missed FR dumps from ranks ({2})"],
    "exits": ["nccl:all_gather", "missing ranks: {2}", "sequence number: 4"],
    "another-kind": ["sequence number: 4 has errors", "COLLECTIVE_TYPE_MISMATCH"],
    "another-count": ["sequence number: 4 has errors", "SIZE_OR_SYNTAX_MISMATCH"],
    "another-dtype": ["sequence number: 4 has errors", "COLLECTIVE_DTYPE_MISMATCH"],
}


def main():
    program, with_analyzer = sys.argv[1], "--analyzer" in sys.argv
    if with_analyzer:
        try:
            import torch.distributed.flight_recorder.fr_trace  # noqa: F401
        except ImportError as e:
            print(f"no analyzer: {e}")
            return 77
    timeline, package = sys.argv[2:4]
    refuse_broken_files(timeline, package)
    failed = 0
    for row, (bad, op, seq, transports) in ROWS.items():
        for transport in transports:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    run(program, row, transport, folder)
                    files, out = sorted(pathlib.Path(folder).iterdir()), pathlib.Path(folder, "torch")
                    dumps = {int(p.name[4:]): json.loads(p.read_bytes()) for p in files}
                    assert convert(package, *files, "-o", out) == (0, "")
                    said = judge({int(p.name[4:]): pickle.loads(p.read_bytes()) for p in out.iterdir()}, row)
                    ok = said == (bad, op, seq)
                    check_timeline(timeline, dumps, files)
                    check_summary(package, files, dumps, (bad, op, seq))
                    assert convert(package, *files, "-o", folder)[0] == 2  # over what it reads
                    assert convert(package, files[0], files[0])[0] == 2  # one rank twice
                    if with_analyzer:
                        said = analyze(out, row)
                        ok = ok and all(part in said for part in ANALYZER_SAYS[row])
                        ok = ok and (bool(bad) or "sequence number" not in said)
                except Exception as e:  # a file that cannot be read is a failure of its row
                    ok, said = False, repr(e)
            print(f"{'ok' if ok else 'FAILED'}  {row} on {transport}" + ("" if ok else f": {said}"))
            failed += not ok
    return failed > 0


sys.exit(main())
