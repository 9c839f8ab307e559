"""Write and read the records of a run: log, metrics, summary and report.

A run directory holds config.yaml, metrics.jsonl (one JSON object per step) and summary.json (facts
about the whole run). The report, report.html, is made from these three files alone, so it can be
made again at any time. The callbacks in trainer/callbacks/ call this package.
"""
