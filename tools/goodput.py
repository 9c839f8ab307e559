"""Simulate which share of the time a run makes new steps; the same as `frontier-llm goodput`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["goodput", *sys.argv[1:]]))
