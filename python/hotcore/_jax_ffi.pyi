# Handlers of XLA's foreign function interface (python/bindings/jax_ffi.cpp). In builds that had
# XLA's headers; hotcore.jax says what to do without.
API_VERSION: tuple[int, int]
"""Of the headers: XLA's that call the handlers are as new or newer."""

def handlers() -> dict[str, dict[str, object]]:
    """Platform -> name of a call -> capsule of its handler."""

def set_cpu(threads: int, isa: str) -> None:
    """Threads (0: one for each core) and instruction set ("": the best) of calls on the CPU."""
