"""Predict which layouts fit a cluster; the same as `frontier-llm plan`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
