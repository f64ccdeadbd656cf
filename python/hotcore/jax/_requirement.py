"""Imported first: raises an error that says what is missing, JAX or this build's handlers."""

_OLDEST = (0, 10)
_NEEDED = "hotcore.jax needs jax 0.10 or newer: pip install 'hotcore[jax]'"

try:
    import jax
except ModuleNotFoundError as error:
    raise ImportError(_NEEDED) from error
if jax.__version_info__ < _OLDEST:
    raise ImportError(f"{_NEEDED} (jax is {jax.__version__})")
try:
    from .. import _jax_ffi  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "hotcore.jax: this build of hotcore has no handlers for XLA, since it was made without "
        "XLA's headers. In a checkout of hotcore: HOT_JAX=ON pip install . (docs/jax.md)"
    ) from error
