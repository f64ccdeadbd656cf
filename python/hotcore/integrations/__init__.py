"""HOT in existing training loops: :class:`HotLoop`, and callbacks built on it.

``hotcore.integrations.transformers.HotCallback`` is for transformers' ``Trainer``,
``hotcore.integrations.lightning.HotCallback`` for Lightning's. With accelerate, Fabric and custom
loops use :class:`HotLoop` itself. ``transformers``, ``torchao``, ``torchtitan`` and ``axolotl``
here are switches in these libraries that convert a model. The package needs torch; the modules
need their libraries.
"""

from .loop import HotLoop, scalar_logger

__all__ = ["HotLoop", "scalar_logger"]
