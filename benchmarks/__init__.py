"""Makes ``python -m benchmarks.evidence.X`` find this folder; the scripts run by their paths."""
