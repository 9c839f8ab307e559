"""Convert weights to and from Hugging Face; the same as `frontier-llm convert`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
