#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a timeline for chrome://tracing or https://ui.perfetto.dev from the flight records of ranks.

example:  COLO_FLIGHT_RECORDER=trace/rank ./train;  tools/timeline.py trace/rank* >trace.json

Each rank is a process of the timeline, each of its communicators a thread. An operation that did not end is drawn
up to the end of the record and is marked "unfinished"."""
import argparse
import json
import pickle
import re
import sys


class Plain(pickle.Unpickler):
    """Numbers, texts, lists and dicts only: a file cannot name code to run."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"names {module}.{name}; a flight record has plain data only")


def events(rank, record):
    yield {"ph": "M", "name": "process_name", "pid": rank,
           "args": {"name": f"rank {rank}, process {record['colobridge']['pid']} on {record['colobridge']['host']}"}}
    threads = {group: i for i, group in enumerate(sorted(record["pg_config"]))}
    for group, i in threads.items():
        config = record["pg_config"][group]
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": i,
               "args": {"name": f"{config['name'] or group} {config['ranks']}"}}
    entries = record["entries"]
    last = max((e["time_discovered_completed_ns"] or e["time_created_ns"] for e in entries), default=0)
    for e in entries:
        begin, end = e["time_created_ns"], e["time_discovered_completed_ns"]
        yield {"ph": "X", "pid": rank, "tid": threads[e["process_group"][0]], "ts": begin / 1e3,
               "dur": ((end or last) - begin) / 1e3, "cat": e["category"],
               "name": e["profiling_name"].split(":")[1] + ("" if end else " (unfinished)"),
               "args": {"number": e["collective_seq_id"], "in": e["input_sizes"], "out": e["output_sizes"],
                        "dtype": e["input_dtypes"], "status": e["status"]}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="the files that COLO_FLIGHT_RECORDER named, one per rank")
    all_events = []
    for path in parser.parse_args().files:
        rank = re.search(r"(\d+)$", path)
        try:
            with open(path, "rb") as f:
                record = Plain(f).load()
            all_events += events(int(rank.group(1)), record)
        except Exception as e:  # whatever a broken pickle makes of itself
            sys.exit(f"timeline: {path}: {e}; expected a flight record whose name ends in the rank's number")
    json.dump({"traceEvents": all_events, "displayTimeUnit": "ms"}, sys.stdout)


main()
