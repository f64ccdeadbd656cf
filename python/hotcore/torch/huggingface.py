"""Former place of the classes for transformers' ``Conv1D``, which pickles of models name."""

from .frozen.conv1d import HotFrozenConv1D as HotFrozenConv1D
from .layers.conv1d import HotConv1D as HotConv1D
