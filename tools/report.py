"""Write a run's report again; the same as `frontier-llm report`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
