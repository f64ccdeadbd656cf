"""Layers that train through HOT: modules of torch.nn, attention, and the head with its loss."""
