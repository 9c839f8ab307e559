"""Show the samples that a run reads; the same as `frontier-llm inspect-data`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["inspect-data", *sys.argv[1:]]))
