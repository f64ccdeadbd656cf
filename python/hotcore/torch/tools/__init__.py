"""What measures a training and changes how it runs: time, memory, noise, recomputation."""
