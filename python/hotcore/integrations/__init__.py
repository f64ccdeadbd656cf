"""HOT in the training loops of others: :class:`HotLoop`, and callbacks made of it.

``hotcore.integrations.transformers.HotCallback`` is for transformers' ``Trainer``,
``hotcore.integrations.lightning.HotCallback`` for Lightning's; accelerate, Fabric and loops written
by hand take :class:`HotLoop` itself. Needs torch; the callbacks need their libraries.
"""

from .loop import HotLoop, scalar_logger

__all__ = ["HotLoop", "scalar_logger"]
