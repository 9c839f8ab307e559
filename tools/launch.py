"""Print or submit the Slurm job of an experiment; the same as `frontier-llm launch`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
