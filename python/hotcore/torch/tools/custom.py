"""A backward of one's own in linear and convolution layers: :class:`CustomBackward`.

It is plain torch, for trying an idea: nothing here is fast. The rivals of the benchmarks
(``benchmarks/evidence/rivals``) are such classes.
"""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..conversion.report import REPORT
from ..conversion.selection import Filter, candidates, why_plain
from ..layers.modules import Changed, HotModule, become
from ..ops import core
from ..ops.calls import autocast_on

Kept = tuple[Tensor, ...]


class Replaced(NamedTuple):
    """Report of :meth:`~hotcore.torch.CustomBackward.convert`."""

    names: tuple[str, ...]
    """Layers that have the backward now."""
    left: dict[str, str]
    """The other layers, each with the reason."""


class CustomBackward:
    """The exact backward of a linear layer; a subclass replaces the parts that it changes.

    Operands are samples of tokens in float32 (float64 for a layer of float64): x ``[B, T, I]``, g_y
    ``[B, T, O]``, w ``[O, I]``. A linear layer's samples are its first axis, its tokens all others
    but the last. A convolution is unfolded: its tokens are the output pixels, its features the
    values of a window. g_b is torch's own sum of g_y.

    Methods run under ``no_grad`` and without autocast. A result of a wrong shape is a ValueError
    that names the method; values are not checked. Names of helpers begin with ``_``: a public name
    that is nearly one of a method here is a TypeError. Source: docs/torch/custom.md.
    """

    elementwise: ClassVar[bool] = True
    """Whether the kept tensors stand for x, value by value; False: for a projection of its tokens.
    A convolution keeps its pixels with True, its unfolded pixels with False."""

    in_eval: bool = False
    """Whether eval mode multiplies :meth:`forward_operands`, too; False: it is plain."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hooks = [name for name in vars(CustomBackward) if not name.startswith("_")]
        for name in vars(cls).keys() - set(hooks):
            if not name.startswith("_") and (
                near := difflib.get_close_matches(name, hooks, 1, 0.8)
            ):
                raise TypeError(
                    f"{cls.__name__}.{name}: CustomBackward calls no such method; did you mean "
                    f"{near[0]}? Begin the name of a helper with an underscore"
                )

    # ---- hooks of a subclass ----

    def forward_operands(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Stand-ins for x and w in the forward pass, in the dtypes of the call; x is kept."""
        return x, w

    def on_grid(self, grid: tuple[int, int]) -> CustomBackward:
        """The backward for tokens that are the pixels of an output of this height and width."""
        return self

    def keep(self, x: Tensor) -> Kept:
        """Tensors that are kept of x ``[B, T, I]`` until backward."""
        return (x,)

    def unkeep(self, kept: Kept, shape: torch.Size) -> Tensor:
        """Stand-in for x, of x's shape (:attr:`elementwise`), or its projection ``[B, T', I]``."""
        return kept[0]

    def gw_gradient(self, gy: Tensor) -> Tensor:
        """Stand-in for g_y ``[B, T, O]`` in g_w, of as many tokens as :meth:`unkeep` has."""
        return gy

    def gx_operands(self, gy: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Stand-ins for g_y and w in g_x."""
        return gy, w

    def g_x(self, gy: Tensor, w: Tensor) -> Tensor:
        """``g_y w``, ``[B, T, I]``."""
        left, right = self.gx_operands(gy, w)
        return left @ right

    def g_w(self, gy: Tensor, x: Tensor) -> Tensor:
        """``g_y^T x`` summed over the samples, ``[O, I]``; x as :meth:`unkeep` gives it."""
        gy = self.gw_gradient(gy)
        if gy.shape[:2] != x.shape[:2]:  # einsum would repeat a single token
            raise ValueError(
                f"{type(self).__name__}.gw_gradient: shape {tuple(gy.shape)}; what unkeep gives "
                f"of x has {tuple(x.shape)}: other samples or tokens"
            )
        return torch.einsum("bto,bti->oi", gy, x)

    # ---- calls of a user ----

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x weight^T + bias`` with this backward.

        Args:
            x: ``[..., I]``.
            weight: ``[O, I]``.
            bias: ``[O]``, or None.

        Returns:
            ``[..., O]`` in x's dtype, under autocast in autocast's.

        Raises:
            ValueError: shapes do not fit; in backward, a method gave another shape than it says.
            RuntimeError: in backward, gradients of gradients are asked for.
        """
        if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"x: shape {tuple(x.shape)}; expected [..., {weight.shape[-1]}] for weight "
                f"{tuple(weight.shape)}"
            )
        x, weight = _cast(x, weight)
        if not x.numel() or not weight.numel():
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        samples = x.reshape((1,) * max(0, 3 - x.dim()) + x.shape).flatten(1, -2)
        y = _run(samples, weight, self, None).reshape(*x.shape[:-1], len(weight))
        return y if bias is None else y + bias.to(y.dtype)

    def convert(self, model: nn.Module, filter_fn: Filter | None = None) -> nn.Module:
        """Give a model's layers this backward in training mode, in place.

        ``nn.Linear`` and ``nn.Conv2d`` of one group are taken. Modules and Parameters stay the same
        objects; eval mode is plain. A layer that has another CustomBackward gets this one.

        Args:
            model: a model without HOT layers (:func:`hotcore.torch.revert`).
            filter_fn: ``filter_fn(layer, name)`` says which layers to take. None takes those of
                :func:`hotcore.torch.convert`.

        Returns:
            The same model. Its ``hot_report`` is a :class:`.Replaced`.

        Raises:
            ValueError: no layer was taken, or the model has HOT layers.
        """
        layers = candidates(model)
        hot = [name or "(root)" for name, module in layers if isinstance(module, HotModule)]
        if hot:
            raise ValueError(f"model: {hot[0]} runs HOT; hotcore.torch.revert(model) comes first")
        fresh = [row for row in layers if not isinstance(row[1], _Custom)]
        left = why_plain(model, fresh, filter_fn)
        for name, module in layers:
            if isinstance(module, _Custom):
                if filter_fn is not None and not filter_fn(module, name):
                    left[name] = "left out by filter_fn"
            elif why := _why_not(module):
                left.setdefault(name, why)
        taken = tuple(name for name, _ in layers if name not in left)
        if not taken:
            raise ValueError(f"model: {type(self).__name__} takes none of its layers: {left}")
        for name in taken:
            layer: Any = model.get_submodule(name)
            if not isinstance(layer, _Custom):
                become(layer, _CLASSES[type(layer)])
            layer.method = self
        model.__dict__[REPORT] = Replaced(taken, left)
        return model


class _Custom(Changed):
    """Base of the layers that have a CustomBackward; ``method`` is in their ``__dict__``."""

    hot_fields = ("method",)
    method: CustomBackward

    def extra_repr(self) -> str:
        """The text of the plain layer, and the name of the method's class."""
        plain: str = super().extra_repr()  # type: ignore[misc]  # nn.Module has it
        return f"{plain}, method={type(self.method).__name__}"


_Windows = tuple[Any, ...] | None
"""Arguments of F.unfold, ``[N, C kh kw, Ho Wo]`` of a convolution's image; None: linear layer."""


class CustomLinear(_Custom, nn.Linear):
    """``nn.Linear`` with a :class:`CustomBackward`; eval mode is plain without ``in_eval``."""

    plain = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """``[..., I]`` to ``[..., O]``."""
        if not (self.training or self.method.in_eval):
            return super().forward(input)
        return self.method.linear(input, self.weight, self.bias)


class CustomConv2d(_Custom, nn.Conv2d):
    """``nn.Conv2d`` of one group, as :class:`CustomLinear`."""

    plain = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        """``[N, C, H, W]`` to ``[N, O, H', W']``, or without the first axis."""
        if not (self.training or self.method.in_eval) or not input.numel():
            return super().forward(input)
        if input.dim() == 3:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        windows = (self.kernel_size, self.dilation, self.padding, self.stride)
        input, weight = _cast(input, self.weight.flatten(1))
        assert not isinstance(self.padding, str)
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        height, width = (
            (input.shape[2 + i] + 2 * self.padding[i] - spans[i]) // self.stride[i] + 1
            for i in range(2)
        )
        grid = (height, width)
        y = _run(input, weight, self.method.on_grid(grid), windows)
        y = y.mT.reshape(len(input), self.out_channels, *grid)
        return y if self.bias is None else y + self.bias.view(-1, 1, 1).to(y.dtype)


_CLASSES: dict[type[nn.Module], Any] = {nn.Linear: CustomLinear, nn.Conv2d: CustomConv2d}


def _why_not(layer: nn.Module) -> str:
    if type(layer) is nn.Linear:
        return ""
    if type(layer) is not nn.Conv2d:
        return f"a {type(layer).__name__}; nn.Linear and nn.Conv2d are taken"
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return f"padding {layer.padding!r}, {layer.padding_mode}; numbers and zeros are taken"
    if layer.groups != 1:
        depthwise = layer.groups == layer.in_channels
        return "depthwise" if depthwise else f"a convolution in {layer.groups} groups"
    return ""


def _cast(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Operands of a product, cast as autocast casts them."""
    dtype = autocast_on(x.device.type)
    return (x, w) if dtype is None else (x.to(dtype), w.to(dtype))


def _wide(x: Tensor) -> Tensor:
    """x in the precision that the methods compute in."""
    return x if x.dtype == torch.float64 else x.float()


def _shaped(result: Tensor, expected: tuple[int, ...], method: CustomBackward, name: str) -> Tensor:
    # autograd would sum a larger gradient to the shape that it expects.
    shape, expected = tuple(result.shape), tuple(expected)
    if shape != expected:
        raise ValueError(f"{type(method).__name__}.{name}: shape {shape}; expected {expected}")
    return result


def _run(x: Tensor, w: Tensor, method: CustomBackward, windows: _Windows) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        y: Tensor = _Backward.apply(x, w, method, windows)  # type: ignore[no-untyped-call]  # so in torch
    return y


def _unfolded(image: Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
    # F.unfold in one copy: on CUDA it launches a kernel for every sample.
    (high, wide), (down, right) = padding, stride
    image = F.pad(image, (wide, wide, high, high))
    samples, channels, *size = image.shape
    grid = [(size[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)]
    sample, channel, row, column = image.stride()
    steps = (dilation[0] * row, dilation[1] * column, down * row, right * column)
    windows = image.as_strided((samples, channels, *kernel, *grid), (sample, channel, *steps))
    return windows.reshape(samples, channels * kernel[0] * kernel[1], grid[0] * grid[1])


class _Backward(torch.autograd.Function):
    """The product of x ``[B, T, I]``, or of an image's ``windows``, and w, and its backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, method: CustomBackward, windows: _Windows
    ) -> Tensor:
        ctx.method, ctx.windows, ctx.dtypes = method, windows, (x.dtype, w.dtype)
        image, x = x, x if windows is None else _unfolded(x, *windows).mT
        left, right = method.forward_operands(x, w)
        y = (left @ right.t()).to(x.dtype)
        _shaped(y, (*x.shape[:2], w.shape[0]), method, "forward_operands: product")
        kept: Kept = ()
        if ctx.needs_input_grad[1]:
            pixels = windows is not None and method.elementwise
            source = image.flatten(2).mT if pixels else x
            ctx.shape = source.shape
            # x itself, where that is what is kept, and no copy of it: others may keep it, too.
            kept = (image,) if _keeps_x(method) else method.keep(_wide(source))
        ctx.save_for_backward(core.kept_weight(w, ctx.needs_input_grad[1]), *kept)
        ctx.image = image.shape
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        method, windows = ctx.method, ctx.windows
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(method).__name__}: gradients of gradients are not computed (create_graph, "
                "torch.func, a backward that is recorded)"
            )
        w, *kept = ctx.saved_tensors
        gy = _wide(gy)
        gx = gw = None
        with torch.autocast(gy.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                wide = _wide(w)
                gx = _shaped(method.g_x(gy, wide), (*gy.shape[:2], w.shape[1]), method, "g_x")
                if windows is not None:
                    gx = F.fold(gx.mT, tuple(ctx.image[2:]), *windows)
                gx = gx.to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                if _keeps_x(method):
                    flat = _wide(kept[0])
                    kept = [flat if windows is None else flat.flatten(2).mT]
                x = method.unkeep(tuple(kept), ctx.shape)
                if method.elementwise:
                    _shaped(x, ctx.shape, method, "unkeep")
                if windows is not None and method.elementwise:
                    x = _unfolded(_wide(x.mT.reshape(ctx.image)), *windows).mT
                gw = _shaped(method.g_w(gy, _wide(x)), w.shape, method, "g_w").to(ctx.dtypes[1])
        return gx, gw, None, None


def _keeps_x(method: CustomBackward) -> bool:
    return type(method).keep is CustomBackward.keep
