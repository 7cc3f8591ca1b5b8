#!/usr/bin/env python3
"""Prints each rank's overlap of communication and computation, as Holistic Trace Analysis finds it.

One line a rank: the rank and the percentage. Exit status 3 if the package cannot be imported.
Usage: tests/hta_overlap.py TRACE_DIR
"""

import logging
import sys

try:
    from hta.trace_analysis import TraceAnalysis
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)


def main():
    logging.disable(logging.CRITICAL)
    analysis = TraceAnalysis(trace_dir=sys.argv[1])
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    for rank, percentage in sorted(zip(overlap["rank"], overlap["comp_comm_overlap_pctg"])):
        print(rank, percentage)


# HTA reads the ranks' files in processes that may import this file anew.
if __name__ == "__main__":
    main()
