"""What a run says about itself: log lines, metrics and where they go, and the report made of them.

The facts of a run lie in three files of its directory: config.yaml, metrics.jsonl (one object a
step) and summary.json. report.html is made of these alone, so it can be made again at any time.
"""
