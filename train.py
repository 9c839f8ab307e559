"""Train a model: `python train.py [key=value ...]` is `frontier-llm train [key=value ...]`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
