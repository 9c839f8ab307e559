"""Build every stage of an experiment without memory; the same as `frontier-llm dry-run`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["dry-run", *sys.argv[1:]]))
