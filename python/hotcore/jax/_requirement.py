"""Checks for JAX and for this build's handlers; hotcore.jax imports it first."""

import importlib.util

_OLDEST = (0, 10)
_NEEDED = "hotcore.jax needs jax 0.10 or newer: pip install 'jax>=0.10'"
_HANDLERS = (
    "this build of hotcore has no handlers for XLA, because XLA's headers were missing. In a "
    "checkout of hotcore: HOT_JAX=ON pip install '.[jax]' (docs/jax.md)"
)


def _also() -> str:
    """Return the missing handlers for the end of an error, or an empty text."""
    return "" if importlib.util.find_spec("hotcore._jax_ffi") else f"; and {_HANDLERS}"


try:
    import jax
except ModuleNotFoundError as error:
    raise ImportError(_NEEDED + _also()) from error
if jax.__version_info__ < _OLDEST:
    raise ImportError(f"{_NEEDED} (jax is {jax.__version__}){_also()}")
try:
    from .. import _jax_ffi  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"hotcore.jax: {_HANDLERS}") from error
