"""Run the program as `python -m frontier_llm COMMAND`, the same as `frontier-llm COMMAND`."""

import sys

from frontier_llm.cli.main import main

sys.exit(main())
