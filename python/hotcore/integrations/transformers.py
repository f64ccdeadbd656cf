"""transformers: ``HotQuantizationConfig`` for ``from_pretrained``, ``HotCallback`` for ``Trainer``.

The import registers the quantizer. Imports transformers.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

import hotcore.torch as hot

from ..config import ConfigLike, HotConfig, as_config
from ..torch.conversion.selection import candidates
from .loop import LoopCallback

# hotcore does not require transformers; the type checker runs without it.
_TrainerCallback: Any = importlib.import_module("transformers.trainer_callback").TrainerCallback
_quantizers: Any = importlib.import_module("transformers.quantizers")
_ConfigMixin: Any = importlib.import_module(
    "transformers.utils.quantization_config"
).QuantizationConfigMixin


class HotQuantizationConfig(_ConfigMixin):  # type: ignore[misc]
    """Option of ``from_pretrained`` that converts the loaded model to HOT.

    ::

        from hotcore.integrations.transformers import HotQuantizationConfig

        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, quantization_config=HotQuantizationConfig("default")
        )

    :func:`hotcore.torch.convert` converts the loaded model: the Parameters stay, in the requested
    dtype, and all are trained. ``save_pretrained`` writes the plain weights under the plain keys,
    and this configuration into config.json. ``from_pretrained`` converts such a checkpoint again if
    this module is imported; otherwise transformers warns and loads the plain model.

    Args:
        config: a HotConfig, a recipe's name, or a mapping of a HotConfig's fields.
        modules_to_not_convert: names of modules that stay plain, in transformers' form: a start or
            an end of the name, or a regular expression. The default filter of ``convert`` (the
            head, small layers, layers that would be slower) applies as well.
        freeze: ``"int4"`` or ``"int8"`` keeps the weights as codes only
            (:func:`hotcore.torch.freeze`), for adapters; True is ``"int8"``. Loading holds the
            plain weights first; checkpoints have dequantised weights.

    Raises:
        TypeError: another type of ``config``, or ``modules_to_not_convert`` is a str.
        ValueError: a wrong field of ``config``, or another ``freeze``.
    """

    def __init__(
        self,
        config: ConfigLike | Mapping[str, Any] = "default",
        modules_to_not_convert: Sequence[str] | None = None,
        freeze: bool | Literal["int8", "int4"] = False,
        quant_method: str = "hot",
    ) -> None:
        """Check the arguments. ``quant_method`` of config.json is always ``"hot"``."""
        if isinstance(modules_to_not_convert, str):
            raise TypeError("modules_to_not_convert: expected a list of names, got a str")
        if isinstance(config, Mapping):
            config = HotConfig.from_json(json.dumps(dict(config)))
        if freeze not in (False, True, "int8", "int4"):
            raise ValueError(f"freeze: expected 'int4', 'int8' or a bool, got {freeze!r}")
        self.quant_method = quant_method
        self.config = as_config(config)
        self.modules_to_not_convert = list(modules_to_not_convert or ())
        self.freeze = freeze

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values for config.json."""
        return {**vars(self), "config": json.loads(self.config.to_json())}

    def convert(self, model: nn.Module) -> None:
        """Convert a loaded model; with ``freeze`` also freeze it."""
        matching = importlib.import_module("transformers.quantizers.quantizers_utils")
        skip, names = self.modules_to_not_convert, [name for name, _ in candidates(model)]
        plain = [name for name in names if not matching.should_convert_module(name, skip)]
        hot.convert(model, self.config, overrides=dict.fromkeys(plain))
        if self.freeze:
            if any(parameter.is_meta for parameter in model.parameters()):
                raise ValueError(
                    "quantization_config: freeze needs all weights in memory; use a device_map "
                    "that offloads none to disk or CPU"
                )
            hot.freeze(model, 4 if self.freeze == "int4" else 8)


class HotQuantizer(_quantizers.HfQuantizer):  # type: ignore[misc]
    """Quantizer that transformers makes and calls for a :class:`HotQuantizationConfig`."""

    is_trainable = True
    is_compileable = True

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` works: it writes plain weights."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether a Trainer accepts the model without adapters."""
        return not self.quantization_config.freeze

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        self.quantization_config.convert(model)
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> nn.Module:
        """Return the plain model for ``model.dequantize()``."""
        return hot.revert(model)


_quantizers.auto.register_quantization_config("hot")(HotQuantizationConfig)
_quantizers.auto.register_quantizer("hot")(HotQuantizer)


class HotCallback(LoopCallback, _TrainerCallback):  # type: ignore[misc]  # untyped base
    """:class:`hotcore.integrations.HotLoop` for a ``Trainer`` of transformers.

    ::

        hot.convert(model, "default")
        trainer = Trainer(model, arguments, train_dataset=data)
        HotCallback.add_to(trainer, noise_every=100)
        trainer.train()

    If an error ends the training, the next ``train()`` or ``close()`` closes the loop.

    Args:
        **options: options of :class:`~hotcore.integrations.HotLoop`, except ``start``. Without
            ``log`` scalars go only to the Trainer's history (``trainer.state.log_history``);
            :meth:`add_to` sends them to everything that the Trainer reports to.

    Raises:
        TypeError: an option that HotLoop does not have.
    """

    def __init__(self, **options: Any) -> None:
        """Keep the options until training begins."""
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
        self._enter(
            model, optimizer, state.global_step, lambda scalars, _: self._pending.update(scalars)
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the step's measurements; the Trainer has already counted the step."""
        scalars, self._pending = self._pending, {}
        if scalars and self._send is not None:
            should_log = control.should_log
            self._send(scalars)
            control.should_log = should_log  # Trainer.log clears it, which would skip the loss
        elif scalars:
            state.log_history.append({**scalars, "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the loop."""
        self.close()
