"""The operators ``torch.ops.hotcore.*`` and the layers' autograd functions, a room a subject.

``linear`` (also weights of which only codes exist), ``conv`` and ``head`` (with its loss) hold what
a layer calls, an autograd function for eager and compiled mode, and its operators. They share
``codes`` (an x compressed for backward, x and weights quantised for 8-bit products) and ``sharing``
(the one cache of codes). ``calls`` has what every call checks, ``sharded`` what a layer does with
DTensors, ``core`` what libhot takes, and ``registry`` the decorator that makes an operator.
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
