"""Measure this machine for the planner; the same as `frontier-llm calibrate`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["calibrate", *sys.argv[1:]]))
