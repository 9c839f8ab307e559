"""Examine this machine; the same as `frontier-llm doctor`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
