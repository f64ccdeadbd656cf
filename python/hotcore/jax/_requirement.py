"""Checks for JAX and for this build's handlers; hotcore.jax imports it first."""

import importlib.util

_NEEDED = "hotcore.jax needs jax 0.10 or newer: pip install 'jax>=0.10'"
_HANDLERS = (
    "this build of hotcore has no handlers for XLA, because XLA's headers were missing. In a "
    "checkout of hotcore: HOT_JAX=ON pip install '.[jax]' (docs/jax.md)"
)
# One error names everything that is missing.
_ALSO = "" if importlib.util.find_spec("hotcore._jax_ffi") else f"; and {_HANDLERS}"

try:
    import jax
except ModuleNotFoundError as error:
    raise ImportError(_NEEDED + _ALSO) from error
if jax.__version_info__ < (0, 10):
    raise ImportError(f"{_NEEDED} (jax is {jax.__version__}){_ALSO}")
if _ALSO:
    raise ImportError(f"hotcore.jax: {_HANDLERS}")
