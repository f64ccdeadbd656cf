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
from torch.nn.grad import conv2d_input, conv2d_weight

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
    but the last. A convolution's g_y has a token per output pixel, its x one per input pixel. Its
    products are torch's convolutions. Overridden products and projections of tokens get x unfolded:
    a token is the window of an output pixel. g_b is torch's own sum of g_y.

    Methods run under ``no_grad`` and without autocast. A result of a wrong shape is a ValueError
    that names the method; values are not checked. Names of helpers begin with ``_``: a public name
    that is nearly one of a method here is a TypeError. Source: docs/torch/custom.md.
    """

    elementwise: ClassVar[bool] = True
    """Whether the kept tensors stand for x, value by value; False: for a projection of its tokens.
    True gives a convolution's :meth:`keep` and :meth:`forward_operands` pixels, False windows."""

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
        return torch.einsum("bto,bti->oi", gy, x.to(gy.dtype))

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
        reasons = why_plain(model, layers, filter_fn)  # the head is the last of all layers
        left = {name: reasons[name] for name, _ in fresh if name in reasons}
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


class _Windows(NamedTuple):
    """A convolution of one group, and the size of its output."""

    kernel: Any
    dilation: Any
    padding: Any
    stride: Any
    grid: tuple[int, int]

    def product(self, image: Tensor, w: Tensor) -> Tensor:
        """``[N, O, H', W']`` of an image ``[N, C, H, W]`` and w ``[O, C kh kw]``."""
        return F.conv2d(image, self._kernels(w), None, self.stride, self.padding, self.dilation)

    def image_gradient(self, gy: Tensor, w: Tensor, image: torch.Size) -> Tensor:
        """g_x of :meth:`product`; gy ``[N, H' W', O]``."""
        rest = (_image(gy, self.grid), self.stride, self.padding, self.dilation)
        gx: Tensor = conv2d_input(image, self._kernels(w), *rest)  # type: ignore[no-untyped-call]
        return gx

    def weight_gradient(self, gy: Tensor, image: Tensor, w: torch.Size) -> Tensor:
        """g_w of :meth:`product`; gy ``[N, H' W', O]``."""
        rest = (_image(gy, self.grid), self.stride, self.padding, self.dilation)
        size = (w[0], image.shape[1], *self.kernel)
        gw: Tensor = conv2d_weight(image.to(gy.dtype), size, *rest)  # type: ignore[no-untyped-call]
        return gw.flatten(1)

    def unfold(self, image: Tensor) -> Tensor:
        """Windows ``[N, H' W', C kh kw]``, in one copy: F.unfold launches a kernel a sample."""
        high, wide = self.padding
        windows = F.pad(image, (wide, wide, high, high))
        for axis, kernel, dilation, stride in zip(
            (2, 3), self.kernel, self.dilation, self.stride, strict=True
        ):
            span = dilation * (kernel - 1) + 1
            windows = windows.unfold(axis, span, stride)[..., ::dilation]
        return windows.permute(0, 1, 4, 5, 2, 3).flatten(1, 3).flatten(2).mT

    def fold(self, gx: Tensor, image: torch.Size) -> Tensor:
        """Sum windows to an image of this shape."""
        # torch 2.6 compiles no slice of a named tuple.
        window = (self.kernel, self.dilation, self.padding, self.stride)
        return F.fold(gx.mT, tuple(image[2:]), *window)

    def _kernels(self, w: Tensor) -> Tensor:
        return w.reshape(len(w), -1, *self.kernel)


def _image(tokens: Tensor, size: Any) -> Tensor:
    return tokens.mT.reshape(len(tokens), -1, *size)


def _tokens(image: Tensor) -> Tensor:
    return image.flatten(2).mT


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
        input, weight = _cast(input, self.weight.flatten(1))
        assert not isinstance(self.padding, str)
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        height, width = (
            (input.shape[2 + i] + 2 * self.padding[i] - spans[i]) // self.stride[i] + 1
            for i in range(2)
        )
        grid = (height, width)
        windows = _Windows(self.kernel_size, self.dilation, self.padding, self.stride, grid)
        y = _run(input, weight, self.method.on_grid(grid), windows)
        if y.dim() == 3:
            y = _image(y, grid)
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


def _run(x: Tensor, w: Tensor, method: CustomBackward, windows: _Windows | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        y: Tensor = _Backward.apply(x, w, method, windows)  # type: ignore[no-untyped-call]  # so in torch
    return y


class _Backward(torch.autograd.Function):
    """The product of x ``[B, T, I]``, or of an image and its ``windows``, and w, and its backward.

    The result is ``[B, T, O]``, or an image if torch's convolution computes it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, method: CustomBackward, windows: _Windows | None
    ) -> Tensor:
        ctx.method, ctx.windows, ctx.dtypes = method, windows, (x.dtype, w.dtype)
        image, pixels = x, windows is not None and method.elementwise
        if windows is not None:
            x = _tokens(x) if pixels else windows.unfold(x)
        left, right = method.forward_operands(x, w)
        if windows is not None and pixels:
            _shaped(left, x.shape, method, "forward_operands: x")
            _shaped(right, w.shape, method, "forward_operands: w")
            y = windows.product(_image(left, image.shape[2:]), right)
        else:
            y = left @ right.t()
            _shaped(y, (*x.shape[:2], w.shape[0]), method, "forward_operands: product")
        kept: Kept = ()
        if ctx.needs_input_grad[1]:
            # x itself, where that is what is kept, and no copy of it: others may keep it, too.
            kept = (image,) if _keeps_x(method) else method.keep(_wide(x))
        ctx.save_for_backward(core.kept_weight(w, ctx.needs_input_grad[1]), *kept)
        ctx.image, ctx.shape = image.shape, x.shape
        # torch 2.11 compiles a cast of nothing, as the last call, to a result without gradients.
        return y if y.dtype == image.dtype else y.to(image.dtype)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        method, windows = ctx.method, ctx.windows
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(method).__name__}: gradients of gradients are not computed (create_graph, "
                "torch.func, a backward that is recorded)"
            )
        w, *kept = ctx.saved_tensors
        gy = _wide(gy if gy.dim() == 3 else _tokens(gy))
        gx = gw = None
        with torch.autocast(gy.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                gx = _image_gradient(method, gy, _wide(w), windows, ctx.image).to(ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                gw = _weight_gradient(method, gy, kept, w.shape, ctx).to(ctx.dtypes[1])
        return gx, gw, None, None


def _image_gradient(
    method: CustomBackward, gy: Tensor, w: Tensor, windows: _Windows | None, image: torch.Size
) -> Tensor:
    if windows is not None and method.elementwise and _inherits(method, "g_x"):
        left, right = method.gx_operands(gy, w)
        _shaped(left, (*gy.shape[:2], len(right)), method, "gx_operands: g_y")
        _shaped(right, (len(right), w.shape[1]), method, "gx_operands: w")
        return windows.image_gradient(left, right, image)
    gx = _shaped(method.g_x(gy, w), (*gy.shape[:2], w.shape[1]), method, "g_x")
    return gx if windows is None else windows.fold(gx, image)


def _weight_gradient(
    method: CustomBackward, gy: Tensor, kept: list[Tensor], w: torch.Size, ctx: Any
) -> Tensor:
    windows: _Windows | None = ctx.windows
    if _keeps_x(method):
        flat = _wide(kept[0])
        if windows is not None:
            flat = _tokens(flat) if method.elementwise else windows.unfold(flat)
        kept = [flat]
    x = method.unkeep(tuple(kept), ctx.shape)
    if method.elementwise:
        _shaped(x, ctx.shape, method, "unkeep")
        if windows is not None:
            image = _image(_wide(x), ctx.image[2:])
            if _inherits(method, "g_w"):
                left = _shaped(method.gw_gradient(gy), gy.shape, method, "gw_gradient")
                return windows.weight_gradient(left, image, w)
            x = windows.unfold(image)
    return _shaped(method.g_w(gy, _wide(x)), w, method, "g_w")


def _inherits(method: CustomBackward, name: str) -> bool:
    return getattr(type(method), name) is getattr(CustomBackward, name)


def _keeps_x(method: CustomBackward) -> bool:
    return _inherits(method, "keep")
