"""Several processes: gradients reduced as codes."""
