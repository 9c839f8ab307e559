"""Read the run configurations of other training programs, for `frontier-llm plan --from FILE`."""
