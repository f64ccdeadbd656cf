"""Measurements of a training, and changes of how it runs: time, memory, noise, recomputation."""
