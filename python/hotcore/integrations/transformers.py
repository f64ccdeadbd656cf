"""transformers: ``HotQuantizationConfig`` for ``from_pretrained``, ``HotCallback`` for ``Trainer``.

The import registers the quantizer. Imports transformers.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

import hotcore.torch as hot

from ..config import ConfigLike, HotConfig, as_config, check_names
from ..torch.conversion.freeze import Freezing
from ..torch.conversion.load import FLOATS, dtypes_of
from ..torch.conversion.report import listed
from ..torch.conversion.selection import candidates
from ..torch.frozen.weights import ALIGNMENT, FrozenModule
from ..torch.ops.frozen_codes import parameter
from .loop import LoopCallback

# hotcore does not require transformers; the type checker runs without it.
_TrainerCallback: Any = importlib.import_module("transformers.trainer_callback").TrainerCallback
try:
    _loading = importlib.import_module("transformers.core_model_loading")
except ModuleNotFoundError as error:
    if error.name != "transformers.core_model_loading":
        raise
    raise ImportError(
        "hotcore.integrations.transformers: expected transformers 5 or newer, got "
        f"{importlib.import_module('transformers').__version__}; hot.convert itself takes models "
        "of older ones"
    ) from None
_ConversionOps: Any = _loading.ConversionOps
_quantizers: Any = importlib.import_module("transformers.quantizers")
_configs: Any = importlib.import_module("transformers.utils.quantization_config")


class HotQuantizationConfig(_configs.QuantizationConfigMixin):  # type: ignore[misc]  # untyped base
    """Option of ``from_pretrained``, ``quantization_config=``, that converts the model to HOT.

    :func:`hotcore.torch.convert` converts the loaded model: the Parameters stay, in the requested
    dtype, and all are trained. ``save_pretrained`` writes the plain weights under the plain keys,
    and this configuration into config.json. ``from_pretrained`` converts such a checkpoint again if
    this module is imported.

    Args:
        config: a HotConfig, a recipe's name, or a mapping of a HotConfig's fields.
        modules_to_not_convert: names of modules that stay plain, in transformers' form: a start or
            an end of the name, or a regular expression. ``convert``'s default filter applies, too.
        freeze: ``"int4"`` or ``"int8"`` keeps the weights as codes only
            (:func:`hotcore.torch.freeze`), for adapters; True is ``"int8"``. Each weight is
            quantised on its device as it is read.
        save_codes: with ``freeze``, ``save_pretrained`` writes the codes themselves, which
            ``from_pretrained`` reads without rounding. Otherwise it writes dequantised weights.

    Raises:
        TypeError: another type of ``config`` or its fields, or ``modules_to_not_convert`` is a str.
        ValueError: a wrong field of ``config``, another ``freeze``, or ``save_codes`` without it.

    Source: docs/torch/integrations.md, "transformers".
    """

    def __init__(
        self,
        config: ConfigLike | Mapping[str, Any] = "default",
        modules_to_not_convert: Sequence[str] | None = None,
        freeze: bool | Literal["int8", "int4"] = False,
        save_codes: bool = False,
        quant_method: str = "hot",
    ) -> None:
        """Check the arguments. ``quant_method`` of config.json is always ``"hot"``."""
        if isinstance(modules_to_not_convert, str):
            raise TypeError("modules_to_not_convert: expected a list of names, got a str")
        if isinstance(config, Mapping):
            check_names(config, "config")
            config = HotConfig(**config)
        if freeze not in (False, True, "int8", "int4"):
            raise ValueError(f"freeze: expected 'int4', 'int8' or a bool, got {freeze!r}")
        if save_codes and not freeze:
            raise ValueError("save_codes: expected False without freeze, which makes the codes")
        self.quant_method = quant_method
        self.config = as_config(config)
        self.modules_to_not_convert = list(modules_to_not_convert or ())
        self.freeze = freeze
        self.save_codes = save_codes

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values for config.json."""
        return {**vars(self), "config": json.loads(self.config.to_json())}

    def convert(self, model: nn.Module, device: Any = None, coded: set[str] | None = None) -> None:
        """Convert a model for training on ``device``; ``coded``: the layers that have codes."""
        matching = importlib.import_module("transformers.quantizers.quantizers_utils")
        skip, names = self.modules_to_not_convert, [name for name, _ in candidates(model)]
        plain = [name for name in names if not matching.should_convert_module(name, skip)]
        only = None if coded is None else lambda _, name: name in coded
        hot.convert(model, self.config, only, dict.fromkeys(plain), device=device)


class _Freeze(_ConversionOps):  # type: ignore[misc]
    """Quantise a weight that has been read, and freeze its layer."""

    def __init__(self, quantizer: HotQuantizer) -> None:
        self._quantizer = quantizer

    def convert(self, input_dict: Mapping[str, Any], missing_keys: Any, **_: Any) -> dict[str, Any]:
        """Leave no tensor for transformers to set."""
        for name, value in input_dict.items():
            self._quantizer.take(name, value[0] if isinstance(value, list) else value)
            missing_keys.discard(name)
        return {}


class HotQuantizer(_quantizers.HfQuantizer):  # type: ignore[misc]
    """Quantizer that transformers makes and calls for a :class:`HotQuantizationConfig`.

    Layers that are to be frozen are converted on the meta device. Each takes its codes when its
    weight is read. A checkpoint with codes has them as Parameters.
    """

    is_trainable = True
    is_compileable = True

    def __init__(self, quantization_config: HotQuantizationConfig, **options: Any) -> None:
        """Read plain weights of a frozen model's checkpoint as those of any other."""
        super().__init__(quantization_config, **options)
        if quantization_config.freeze and not quantization_config.save_codes:
            self.pre_quantized = False
        self._freezing: Freezing | None = None
        self._frozen: dict[str, str] = {}
        """Layers that wait for their weight, by the weight's key."""

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` works: it writes plain weights, or codes."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether a Trainer accepts the model without adapters."""
        return not self.quantization_config.freeze

    @property
    def quantized_element_size(self) -> float | None:
        """Bytes of a value in codes."""
        if not self.quantization_config.freeze:
            return None
        return 0.55 if self.quantization_config.freeze == "int4" else 1.01

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuse to freeze weights that are offloaded. Raises ValueError."""
        where = set(map(str, device_map.values())) if isinstance(device_map, dict) else set()
        if self.quantization_config.freeze and ("disk" in where or {"cpu"} < where):
            raise ValueError(
                "quantization_config: freeze needs all weights in memory; use a device_map "
                "that offloads none to disk or CPU"
            )

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether a tensor of the checkpoint is the weight of a layer to be frozen."""
        return param_name in self._frozen

    def get_quantize_ops(self) -> Any:
        """Operation that transformers calls with each such weight."""
        return _Freeze(self)

    def take(self, name: str, weight: Any) -> None:
        """Freeze the layer of a weight that has been read."""
        assert self._freezing is not None
        fqn = self._frozen[name]
        layer = self._freezing.layers[fqn]
        like = layer._parameters["weight"]
        if weight.shape != like.shape:
            raise ValueError(f"{name}: shape {list(weight.shape)}; expected {list(like.shape)}")
        codes = self._freezing.encoded_weight(fqn, weight.to(like.dtype))
        self._freezing.freeze(fqn, parameter(codes))
        layer._is_hf_initialized = True

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any = None, checkpoint_files: Any = None, **_: Any
    ) -> Any:
        config = self.quantization_config
        if not config.freeze:
            return model
        keys = _dtypes(model, checkpoint_files) if self.pre_quantized else {}
        end = ".weight_codes"
        coded = {key.removesuffix(end) for key in keys if key.endswith(end)}
        self.pre_quantized = bool(coded)
        config.convert(model, _device_of(device_map), coded or None)
        tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
        self._freezing = freezing = Freezing(
            model,
            4 if config.freeze == "int4" else 8,
            lambda _, name: f"{name}.weight" not in tied,  # transformers sets these again
            save_codes=config.save_codes,
        )
        self._frozen = {f"{fqn}.weight": fqn for fqn in freezing.layers}
        if coded:
            for name, fqn in self._frozen.items():
                self.take(name, freezing.layers[fqn]._parameters["weight"])
            self._frozen = {}
        else:
            self._check_dtypes(model, checkpoint_files or ())
        return model

    def _check_dtypes(self, model: Any, files: Sequence[str]) -> None:
        """Refuse codes of another quantiser, which transformers would cast to values."""
        dtypes = _dtypes(model, [file for file in files if file.endswith(".safetensors")])
        wrong = [f"{n}: {dtypes[n]}" for n in self._frozen if dtypes.get(n, "F32") not in FLOATS]
        if wrong:
            raise ValueError(
                f"quantization_config: freeze quantises {', '.join(FLOATS)}; the checkpoint has "
                f"{listed(wrong)}; take one with plain weights"
            )

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self._freezing is None:
            self.quantization_config.convert(model)
            return model
        layers = self._freezing.layers
        if absent := [n for n, layer in layers.items() if not isinstance(layer, FrozenModule)]:
            raise ValueError(
                f"quantization_config: the checkpoint has no usable weight for {listed(absent)}, "
                "which freeze would quantise; name these layers in modules_to_not_convert"
            )
        for layer in layers.values():
            if layer.weight_codes.data_ptr() % ALIGNMENT:  # in the memory of a file
                layer.weight_codes = parameter(layer.weight_codes.detach().clone())
            layer.on_frozen()
            if layer.bias is not None and not getattr(layer.bias, "_is_hf_initialized", False):
                nn.init.zeros_(layer.bias)  # missing in the checkpoint, as transformers warns
        self._freezing.report()
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> nn.Module:
        """Return the plain model for ``model.dequantize()``."""
        return hot.revert(model)


def _device_of(device_map: Any) -> Any:
    """The device for which layers are chosen: the first that is no CPU."""
    if isinstance(device_map, dict):
        others = [each for each in device_map.values() if str(each) not in ("cpu", "disk")]
        return torch.device(others[0]) if others else "cpu"
    return "cuda" if device_map is not None and torch.cuda.is_available() else "cpu"


def _dtypes(model: Any, files: Sequence[str]) -> dict[str, str]:
    """Dtypes of the files' tensors by key, with and without the base model's prefix."""
    prefix, dtypes = f"{model.base_model_prefix}.", dtypes_of(files) if files else {}
    more = {k.removeprefix(prefix): dtype for k, dtype in dtypes.items()}
    return more | {prefix + k: dtype for k, dtype in dtypes.items()} | dtypes


_quantizers.auto.register_quantization_config("hot")(HotQuantizationConfig)
_quantizers.auto.register_quantizer("hot")(HotQuantizer)


class HotCallback(LoopCallback, _TrainerCallback):  # type: ignore[misc]  # untyped base
    """:class:`hotcore.integrations.HotLoop` for a ``Trainer`` of transformers.

    If an error ends the training, the next ``train()`` or ``close()`` closes the loop.

    Args:
        **options: options of :class:`~hotcore.integrations.HotLoop`, except ``start``. Without
            ``log`` scalars go only to the Trainer's history (``trainer.state.log_history``);
            :meth:`add_to` sends them to everything that the Trainer reports to.

    Raises:
        TypeError: an option that HotLoop does not have.

    Source: docs/torch/integrations.md, "transformers".
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._send: Callable[[dict[str, float]], object] | None = None
        self._pending: dict[str, float] = {}

    @classmethod
    def add_to(cls, trainer: Any, **options: Any) -> HotCallback:
        """Add a callback that sends its scalars to the Trainer's log; return it."""
        callback = cls(**options)
        callback._send = trainer.log
        trainer.add_callback(callback)
        return callback

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any
    ) -> None:
        """Enter the loop."""
        self.close()
        self._enter(model, optimizer, state.global_step, lambda new, _: self._pending.update(new))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the step's measurements; the Trainer has already counted the step."""
        scalars, self._pending = self._pending, {}
        if scalars and self._send is not None:
            should_log = control.should_log
            self._send(scalars)
            control.should_log = should_log  # Trainer.log clears it, which would skip the loss
        elif scalars:
            state.log_history.append({**scalars, "step": state.global_step})
