"""Axolotl: ``plugins: [hotcore.integrations.axolotl.HotPlugin]``. Imports axolotl."""

from __future__ import annotations

import importlib
from typing import Any, Literal

import hotcore.torch as hot

from .transformers import HotQuantizationConfig

# hotcore does not require axolotl; the type checker runs without it.
_BasePlugin: Any = importlib.import_module("axolotl.integrations.base").BasePlugin
_BaseModel: Any = importlib.import_module("pydantic").BaseModel

_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")


class HotArgs(_BaseModel):  # type: ignore[misc]
    """Fields that the plugin adds to Axolotl's YAML; see ``HotQuantizationConfig``."""

    hot_config: str | dict[str, Any] | None = None
    """A recipe's name or the fields of a HotConfig; None: ``"default"``."""
    hot_modules_to_not_convert: list[str] | None = None
    """Names of modules that stay plain."""
    hot_freeze: bool | Literal["int8", "int4"] | None = None
    """Keep the base's weights as codes only, for an adapter; true: ``"int8"``."""


class HotPlugin(_BasePlugin):  # type: ignore[misc]
    """Converts the model to HOT after it is built, before adapters are put around its layers.

    Axolotl's LoRA kernels multiply the weights without calling the layers, and so bypass HOT. The
    plugin switches them off.

    Raises:
        ValueError: ``lora_mlp_kernel``, ``lora_qkv_kernel`` or ``lora_o_kernel`` is true,
            ``hot_freeze`` is set without ``adapter``, or ``hot_config`` is wrong.
    """

    def register(self, cfg: Any) -> None:
        """Check the values of the file, before Axolotl sets its defaults."""
        if wanted := [name for name in _KERNELS if cfg.get(name)]:
            raise ValueError(f"{wanted[0]}: bypasses the layers that HOT replaces; set it to false")
        if cfg.get("hot_freeze") and not cfg.get("adapter"):
            raise ValueError("hot_freeze: requires an adapter: frozen weights are not trained")
        cfg.update(dict.fromkeys(_KERNELS, False))

    def get_input_args(self) -> str:
        """The name of the class with the YAML's fields."""
        return f"{HotArgs.__module__}.{HotArgs.__name__}"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Convert the model."""
        names = cfg.hot_modules_to_not_convert
        HotQuantizationConfig(cfg.hot_config or "default", names).convert(model)
        if cfg.hot_freeze:
            hot.freeze(model, bits=4 if cfg.hot_freeze == "int4" else 8)
