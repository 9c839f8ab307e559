"""List, verify, compare or export a checkpoint; the same as `frontier-llm inspect`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["inspect", *sys.argv[1:]]))
