"""Two CPU devices for the tests of sharding, set before JAX looks for devices."""

import os

_DEVICES = "--xla_force_host_platform_device_count=2"

if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
