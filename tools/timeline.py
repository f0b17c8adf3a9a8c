#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a timeline for chrome://tracing or https://ui.perfetto.dev from the flight records of ranks.

example:  COLO_FLIGHT_RECORDER=trace/rank ./train;  tools/timeline.py trace/rank* >trace.json

Each rank is a process of the timeline, each of its communicators a thread. An operation that did not end well is drawn
up to the end of the record and is marked "unfinished"."""
import argparse
import json
import sys


def events(record):
    rank, last = record["comms"][0]["world_rank"], 0.0
    for comm in record["comms"]:
        for op in comm["ring"]:
            last = max(last, op["end"] or op["begin"])
    yield {"ph": "M", "name": "process_name", "pid": rank,
           "args": {"name": f"rank {rank}, process {record['comms'][0]['pid']} on {record['comms'][0]['host']}"}}
    for i, comm in enumerate(sorted(record["comms"], key=lambda comm: comm["id"])):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": i,
               "args": {"name": f"{comm['name'] or comm['id']} {comm['members']}"}}
        epoch = comm["wall"] - comm["now"]
        for op in comm["ring"]:
            ended = op["status"] == "COLO_OK"
            yield {"ph": "X", "pid": rank, "tid": i, "ts": (epoch + op["begin"]) * 1e6,
                   "dur": ((op["end"] if ended else last) - op["begin"]) * 1e6, "cat": op["category"],
                   "name": op["op"] + ("" if ended else " (unfinished)"),
                   "args": {"number": op["seq"], "count": op["count"], "dtype": op["dtype"], "sent": op["sent_bytes"],
                            "received": op["recv_bytes"], "status": op["status"]}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="the files that COLO_FLIGHT_RECORDER named, one per rank")
    all_events = []
    for path in parser.parse_args().files:
        try:
            with open(path, "rb") as f:
                all_events += events(json.load(f))
        except (OSError, ValueError, KeyError, TypeError, IndexError) as e:
            sys.exit(f"timeline: {path}: {type(e).__name__}: {e}; expected a flight record")
    json.dump({"traceEvents": all_events, "displayTimeUnit": "ms"}, sys.stdout)


main()
