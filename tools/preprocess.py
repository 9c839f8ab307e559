"""Tokenize text into a corpus; the same as `frontier-llm preprocess`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
