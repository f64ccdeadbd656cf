"""HOT in existing training loops: :class:`HotLoop`, and callbacks built on it.

``hotcore.integrations.transformers.HotCallback`` is for transformers' ``Trainer``,
``hotcore.integrations.lightning.HotCallback`` for Lightning's. With accelerate, Fabric and custom
loops use :class:`HotLoop`. The modules ``transformers``, ``torchao``, ``torchtitan`` and
``axolotl`` convert a model by an option of these libraries. They need torch and their library.
"""

from .loop import HotLoop, scalar_logger

__all__ = ["HotLoop", "scalar_logger"]
