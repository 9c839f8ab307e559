"""The records of a run: log, metrics, summary and report.

A run directory holds config.yaml, metrics.jsonl (one JSON object per step) and summary.json.
report.html is made from these three files alone, so it can be made again at any time.
"""
