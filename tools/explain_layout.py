"""Draw which rank holds which model states; the same as `frontier-llm explain-layout`."""

import sys

from frontier_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["explain-layout", *sys.argv[1:]]))
