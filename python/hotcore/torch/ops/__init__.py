"""The operators ``torch.ops.hotcore.*`` and the layers' autograd functions, a room a subject.

``linear``, ``conv`` and ``head`` (with its loss) hold a layer's function, its autograd function for
eager and compiled mode, and its operators. They share ``codes`` (an x compressed for backward, x
and weights quantised for 8-bit products) and ``sharing`` (the one cache of codes). ``calls`` checks
a call, ``sharded`` splits DTensors, ``core`` converts objects for libhot, and ``registry`` makes an
operator of a function.
"""

from . import conv, head, linear
from .codes import draw_seed
from .core import DTYPES, PLAIN_TYPES, seed_for
from .registry import library, not_differentiable
from .sharded import is_dtensor
from .sharing import share_inputs

__all__ = [
    "DTYPES",
    "PLAIN_TYPES",
    "conv",
    "draw_seed",
    "head",
    "is_dtensor",
    "library",
    "linear",
    "not_differentiable",
    "seed_for",
    "share_inputs",
]
