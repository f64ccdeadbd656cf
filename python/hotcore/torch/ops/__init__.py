"""The operators ``torch.ops.hotcore.*`` and the layers' autograd functions, a room a subject.

docs/dev/map.md, "Python", says what each room is for.
"""

from . import conv, head, linear
from .core import DTYPES, PLAIN_TYPES
from .sharded import is_dtensor

__all__ = ["DTYPES", "PLAIN_TYPES", "conv", "head", "is_dtensor", "linear"]
