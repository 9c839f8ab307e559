"""Choose hyper-parameters on small models; the same as `frontier-llm funnel`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["funnel", *sys.argv[1:]]))
