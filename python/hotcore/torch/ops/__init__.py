"""The operators ``torch.ops.hotcore.*`` and the layers' autograd functions, a room a subject.

``linear``, ``conv`` and ``head`` (with its loss) hold a layer's function, its autograd function for
eager and compiled mode, and its operators. They share ``codes`` (an x compressed for backward, x
and weights quantised for 8-bit products) and ``sharing`` (the one cache of codes). ``calls`` checks
a call, ``sharded`` splits DTensors, ``core`` converts objects for libhot, and ``registry`` makes an
operator of a function.
"""

from . import conv, head, linear
from .core import DTYPES, PLAIN_TYPES
from .sharded import is_dtensor
from .sharing import share_inputs

__all__ = ["DTYPES", "PLAIN_TYPES", "conv", "head", "is_dtensor", "linear", "share_inputs"]
