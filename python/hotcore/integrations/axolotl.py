"""Axolotl: ``plugins: [hotcore.integrations.axolotl.HotPlugin]``. Imports axolotl."""

from __future__ import annotations

import importlib
from typing import Any

from .transformers import HotQuantizationConfig

# hotcore does not require axolotl; the type checker runs without it.
_BasePlugin: Any = importlib.import_module("axolotl.integrations.base").BasePlugin
_BaseModel: Any = importlib.import_module("pydantic").BaseModel

_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")


class HotArgs(_BaseModel):  # type: ignore[misc]
    """What the plugin adds to Axolotl's YAML; see ``HotQuantizationConfig``."""

    hot_config: str | dict[str, Any] | None = None
    """A recipe's name or the fields of a HotConfig; ``"default"`` where it is absent."""
    hot_modules_to_not_convert: list[str] | None = None
    """Names of modules that stay plain."""
    hot_freeze: bool | None = None
    """Keep the base's weights as INT8 codes alone, for an adapter."""


class HotPlugin(_BasePlugin):  # type: ignore[misc]
    """Converts the model to HOT after it is built, before adapters are put around its layers.

    Axolotl's own LoRA kernels multiply the weights without calling the layers, so HOT would not be
    used: they are switched off.

    Raises:
        ValueError: ``lora_mlp_kernel``, ``lora_qkv_kernel`` or ``lora_o_kernel`` is true,
            ``hot_freeze`` without ``adapter``, or a bad ``hot_config``.
    """

    def register(self, cfg: Any) -> None:
        """Check the configuration as it was read; Axolotl sets its defaults later."""
        if wanted := [name for name in _KERNELS if cfg.get(name)]:
            raise ValueError(f"{wanted[0]}: HOT's layers are not called by it; set it to false")
        if cfg.get("hot_freeze") and not cfg.get("adapter"):
            raise ValueError("hot_freeze: frozen weights are not trained; it needs an adapter")
        cfg.update(dict.fromkeys(_KERNELS, False))

    def get_input_args(self) -> str:
        """The name of the class with the YAML's fields."""
        return f"{HotArgs.__module__}.{HotArgs.__name__}"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Convert the model."""
        names = cfg.hot_modules_to_not_convert
        wanted = HotQuantizationConfig(cfg.hot_config or "default", names, bool(cfg.hot_freeze))
        wanted.convert(model)
