"""Imported before anything else here: says what is missing, JAX or this build's handlers."""

try:
    import jax
except ModuleNotFoundError as error:
    raise ImportError(
        "hotcore.jax needs jax 0.10 or newer: pip install 'hotcore[jax]'"
    ) from error
try:
    from .. import _jax_ffi  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "hotcore.jax: this build of hotcore has no handlers for XLA, since the build found none of "
        "its headers. In a checkout of hotcore: python3 scripts/fetch_xla_ffi.py, then install "
        "again (docs/jax.md)"
    ) from error
