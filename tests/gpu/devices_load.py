"""Random layers on one device, compared with the CPU: a process or thread of test_trust.py.

python tests/gpu/devices_load.py DEVICE SEED SECONDS prints what :func:`load` returns, as JSON.
"""

import hashlib
import json
import sys
import time
from typing import Any

import numpy as np
import torch
from support_gpu import RECIPES, layer, same_bits, whole_backward

HASHED = 12


def load(device: str, seed: int, seconds: float) -> dict[str, Any]:
    """Run backwards of random layers. Count them and those that differ, and hash the first.

    Args:
        device: Device of the work.
        seed: Seed of shapes, recipes, values and keys. Equal seeds give equal hashes.
        seconds: Duration. At least ``HASHED`` layers run, however long it takes.
    """
    rng = np.random.default_rng(seed)
    values = torch.Generator().manual_seed(seed)
    digest = hashlib.sha256()
    layers = different = 0
    until = time.monotonic() + seconds
    while layers < HASHED or time.monotonic() < until:
        shape = [int(size) for size in rng.integers(1, 200, size=3)]
        dtype = (torch.float32, torch.float16, torch.bfloat16)[rng.integers(3)]
        recipe = RECIPES[layers % len(RECIPES)]
        key = int(rng.integers(1 << 62))
        arrays = layer(*shape, dtype, generator=values)
        wanted = whole_backward(arrays, recipe, "cpu", key)
        got = whole_backward(arrays, recipe, device, key)
        torch.cuda.synchronize(device)
        for a, b in zip(got[:3], wanted[:3], strict=True):  # saved x, g_x, g_w
            different += not same_bits(a, b)
            if layers < HASHED:
                digest.update(a.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        layers += 1
    return {"layers": layers, "different": different, "hash": digest.hexdigest()[:16]}


if __name__ == "__main__":
    print(json.dumps(load(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
