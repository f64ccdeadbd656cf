# Handlers of XLA's foreign function interface (python/bindings/jax_ffi.cpp), in builds with XLA's
# headers. Without them the import of hotcore.jax says how to build them.
API_VERSION: tuple[int, int]
"""Version of the headers; XLA must have this version or a newer one."""

def handlers() -> dict[str, dict[str, object]]:
    """Return platform -> name of a call -> capsule of its handler."""

def set_cpu(threads: int, isa: str) -> None:
    """Set threads (0: one for each core) and instruction set ("": the best) of calls on the CPU."""
