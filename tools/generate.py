"""Sample text from a run; the same as `frontier-llm generate`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
