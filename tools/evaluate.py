"""Compute the validation loss of a checkpoint; the same as `frontier-llm evaluate`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
