"""The operators ``torch.ops.hotcore.*`` and the layers' autograd functions, a room a subject.

``linear``, ``conv`` and ``frozen`` (weights of which only codes exist) hold an entry, an autograd
function for eager and compiled layers, and its operators. They share ``codes`` (an x compressed for
backward, x and weights quantised for 8-bit products) and ``sharing`` (the one cache of codes).
``calls`` has what an entry checks, ``core`` what libhot takes, ``registry`` the decorator that makes
an operator.
"""

from .codes import draw_seed
from .conv import conv2d
from .core import DTYPES, PLAIN_TYPES, not_differentiable, seed_for
from .frozen import frozen_linear
from .linear import linear
from .registry import library
from .sharing import register_restore, share_inputs

__all__ = [
    "DTYPES",
    "PLAIN_TYPES",
    "conv2d",
    "draw_seed",
    "frozen_linear",
    "library",
    "linear",
    "not_differentiable",
    "register_restore",
    "seed_for",
    "share_inputs",
]
