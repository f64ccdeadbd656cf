"""Changes of a whole model: ``convert``, ``revert``, ``freeze_int8``, ``thaw``, and why not."""
