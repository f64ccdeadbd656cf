"""``LinearCrossEntropy``; :func:`attach`: its loss in transformers' causal LM models."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import threading
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...config import ConfigLike, as_config
from .. import _compat
from ..ops.head import linear_cross_entropy
from .modules import HotLinear, OwnForward

_FORWARD = "forward"
_LOSS = "_loss_function"
"""Where transformers keeps a ``loss_function`` that was set."""


class LinearCrossEntropy(nn.Linear):
    """An ``nn.Linear`` head that returns the loss of a target: :func:`linear_cross_entropy`.

    Parameters and state_dict keys are those of ``nn.Linear``; ``head.weight = embedding.weight``
    ties it. The first arguments are those of ``nn.Linear``, without a bias by default. ``config``
    is None, a HotConfig or a recipe's name. ``options`` are the other keyword arguments of
    :func:`linear_cross_entropy`, whose errors a call raises, too. Source: docs/torch/head.md.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        config: ConfigLike | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        inspect.signature(linear_cross_entropy).bind(None, None, None, **options)  # TypeError
        self.config = None if config is None else as_config(config)
        self.options = options

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of ``[..., I]`` and ``[...]``; without a target the logits ``[..., V]``."""
        if target is None:
            return super().forward(input)
        return linear_cross_entropy(
            input, self.weight, target, self.bias, self.config, **self.options
        )

    def extra_repr(self) -> str:
        """The text of ``nn.Linear``, and the configuration."""
        return f"{super().extra_repr()}, config={self.config}"


# ---- transformers ----


class HeadForward:
    """The forward of a model's head, which keeps x instead inside of an :class:`AttachedLoss`."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.keeps = False
        self.x: Tensor | None = None

    def __call__(self, input: Tensor) -> Tensor:
        """Logits; ``[..., 0]`` where x is kept."""
        if not self.keeps:
            logits: Tensor = type(self.head).forward(self.head, input)
            return logits
        self.keeps, self.x = False, input
        return input.new_empty((*input.shape[:-1], 0))


class LossOfX:
    """The ``loss_function`` of a model with an :class:`AttachedLoss`.

    torch's compiler before 2.12 takes a bound method for another one than itself.
    """

    def __init__(self, attached: AttachedLoss) -> None:
        self.attached = attached

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """``ForCausalLMLoss`` of transformers, of the x that the head has kept."""
        attached = self.attached
        x, head = attached.head.x, attached.head.head
        if x is None:
            named = {"ignore_index": ignore_index, "shift_labels": shift_labels, **others}
            plain: Tensor = attached.plain_loss(
                logits, labels, vocab_size, num_items_in_batch, **named
            )
            return plain
        if shift_labels is None:  # a token predicts the next one
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = linear_cross_entropy(
            *(x, head.weight, shift_labels.view(x.shape[:-1]).to(x.device), head.bias),
            config=attached.config,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            softcap=getattr(attached.model.config, _SOFTCAP) if attached.capped else None,
        )
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        mean: Tensor = loss / num_items_in_batch
        return mean


class AttachedLoss(OwnForward):
    """The forward of a causal LM model.

    In training, with labels, the head keeps its x instead of logits, and the model's own
    ``loss_function`` returns x's loss. The rest of the model's forward is unchanged. All logits are
    computed where hooks of the head need them, or an adapter that has taken its place.
    """

    def __init__(self, model: Any, name: str, config: ConfigLike | None, capped: bool) -> None:
        """Prepare the state that :func:`attach` installs; ``name`` is the head's in the model."""
        self.model, self.name, self.config, self.capped = model, name, config, capped
        self.inside: dict[str, int] = {}
        """The thread that runs the model, as ``thread``; no lock: models are copied."""
        head = getattr(model, name)
        self.head = HeadForward(head)
        self.forward, self.plain_loss = model.forward, model.loss_function
        names = [*inspect.signature(model.forward).parameters]
        self.at = names.index("labels") if "labels" in names else len(names)
        """Position of the labels among the arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. Raises RuntimeError in a second thread: there is one x to keep."""
        if not torch.compiler.is_compiling():
            thread = threading.get_ident()
            if self.inside.setdefault("thread", thread) != thread:
                raise RuntimeError(
                    "hotcore.torch.convert: head: another thread runs this model; give each a copy "
                    "of it, which may share the Parameters"
                )
        # No zip of names and args: torch 2.6 does not compile one of unequal lengths.
        labels = args[self.at] if self.at < len(args) else kwargs.get("labels")
        self.head.keeps = self.model.training and labels is not None and not self._needs_logits()
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.head.keeps, self.head.x = False, None
            self.inside.pop("thread", None)

    def _needs_logits(self) -> bool:
        """Whether something between head and loss has to see logits; a warning names it once."""
        head, within = self.head.head, getattr(self.model, self.name)
        if within is not head:
            _whole_logits(f"{self.name} is a {type(within).__name__} now")
            return True
        if getattr(self.model.loss_function, "attached", None) is not self:
            _whole_logits("the model's loss_function was replaced")
            return True
        hooks = [head._forward_hooks, head._backward_hooks, head._backward_pre_hooks]
        if not torch.compiler.is_compiling():
            hooks += _compat.global_module_hooks()
        for hook in itertools.chain.from_iterable(each.values() for each in hooks):
            if not str(getattr(hook, "__module__", "")).startswith("hotcore."):
                _whole_logits(f"{self.name} has the hook {getattr(hook, '__qualname__', hook)}")
                return True
        return False


@functools.cache
def _whole_logits(why: str) -> None:
    warnings.warn(
        f"hotcore.torch.convert: head: {why}, which a loss in chunks would pass by: "
        "all logits are computed",
        stacklevel=4,
    )


def attach(model: nn.Module, config: ConfigLike | None = None) -> str:
    """Have a causal LM model of transformers compute its loss in chunks, in place.

    In training mode, called with labels, its ``logits`` are then empty, ``[..., 0]``.
    ``hot.revert`` undoes it. ``config`` is that of :func:`linear_cross_entropy`. Returns why it was
    not done; empty if it was.
    """
    state = [(vars(m), dict(vars(m))) for m in model.modules() if _FORWARD in vars(m)]
    try:
        detach(model)
    except ValueError as error:
        return str(error).removeprefix("model: ")
    why = _attach(model, config)
    for content, before in state if why else ():
        content.update(before)
    return why


def _attach(model: nn.Module, config: ConfigLike | None) -> str:
    base = _compat.loaded("transformers.modeling_utils", "PreTrainedModel")
    inner: Any = next((m for m in model.modules() if isinstance(m, base)), None)
    if inner is None:
        return "no model of transformers"
    head = inner.get_output_embeddings()
    if head is None:
        return "it has no output head"
    if type(head) not in (nn.Linear, HotLinear):
        return f"its head is a {type(head).__name__}, not an nn.Linear"
    if _FORWARD in vars(head):
        return "its head has a forward of its own"
    loss = getattr(inner.loss_function, "__name__", type(inner.loss_function).__name__)
    if loss != "ForCausalLMLoss":
        return f"its loss is {loss}, not ForCausalLMLoss"
    names = [n for n, child in inner.named_children() if child is head]
    kind: Any = type(inner)
    why, capped = _path_of_logits(kind, names[0] if names else "")
    if why:
        return why
    state = AttachedLoss(inner, names[0], config, capped)
    vars(head)[_FORWARD] = state.head
    state.install(inner, **{_LOSS: LossOfX(state)})
    return ""


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`. Raises ValueError where the model's forward was wrapped afterwards."""
    forwards = {module: OwnForward.of(module) for module in model.modules()}
    states = {m: each for m, each in forwards.items() if isinstance(each, AttachedLoss)}
    heads = set(filter(is_attached, forwards))  # copies, too
    if heads - {model} and not states:
        raise ValueError(
            "model: the forward of the model whose head has its loss in chunks was wrapped "
            "afterwards (accelerate's prepare, a patch); undo that first"
        )
    for head in heads | {state.head.head for state in states.values()}:
        vars(head).pop(_FORWARD, None)
    for module, state in states.items():
        state.uninstall(module)


def is_attached(module: nn.Module) -> bool:
    """Whether it is the head of a model with :func:`attach`."""
    return isinstance(vars(module).get(_FORWARD), HeadForward)


_SOFTCAP = "final_logit_softcapping"
_CAPPING = """if self.config.{cap} is not None:
    {logits} = {logits} / self.config.{cap}
    {logits} = torch.tanh({logits})
    {logits} = {logits} * self.config.{cap}"""


@functools.cache
def _path_of_logits(cls: Any, head: str) -> tuple[str, bool]:
    """Why a model's loss is not that of its head's output alone; whether that output is capped.

    The source of its forward tells. The output may go into ``self.loss_function`` and into the
    result, and nowhere else.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))
    except (OSError, TypeError, SyntaxError):
        return "its forward has no source", False
    nodes = list(ast.walk(tree))
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    uses = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == f"self.{head}"]
    top: Any = uses[0] if len(uses) == 1 else tree
    while getattr(parents.get(top), "attr", "") in ("float", "contiguous"):
        top = parents[parents[top]]
    assigned = parents.get(top)
    if not isinstance(assigned, ast.Assign) or not isinstance(assigned.targets[0], ast.Name):
        return "its forward does not call its head once, as logits = self.head(x)", False
    logits, capped, losses = assigned.targets[0].id, False, 0
    capping = _CAPPING.format(cap=_SOFTCAP, logits=logits)
    for node in nodes:
        if not isinstance(node, ast.Name) or node.id != logits or node is assigned.targets[0]:
            continue
        above = parents[node]
        call = parents[above] if isinstance(above, ast.keyword) else above
        loss = isinstance(call, ast.Call) and ast.unparse(call.func) == "self.loss_function"
        losses += loss
        if loss or isinstance(above, ast.Tuple):  # of the result
            continue
        if isinstance(above, ast.keyword) and not ast.unparse(call).startswith("self."):
            continue  # of the result, too
        while not isinstance(above, ast.stmt):
            above = parents[above]
        if ast.unparse(parents[above]) != capping:
            return f"its forward uses the logits otherwise: {ast.unparse(above)}", False
        capped = True
    return ("" if losses == 1 else "its forward does not call self.loss_function"), capped
