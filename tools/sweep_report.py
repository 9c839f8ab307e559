"""Compare the runs of a sweep; the same as `frontier-llm sweep-report`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["sweep-report", *sys.argv[1:]]))
