"""Fuzzing of the loaders: HotConfig.from_json and the buffer of a Saved.

python tests/fuzz/fuzz_loaders.py [--seconds 20] [--seed N]

A text is a writer's output with defects (bytes changed, cut, doubled, fields of other types, other
numbers, deeper nesting), or no JSON. A loader must either raise a ValueError that names the
argument, or return an object that survives writing and reading. The seed is printed.
"""

import argparse
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = Path(__file__).resolve().parents[2] / "python"


def loaders() -> dict[str, Callable[[bytes], bool]]:
    """Loaders by name. A loader returns true if the bytes were read, and raises on a defect."""
    import hotcore
    from hotcore import HotConfig, Key
    from hotcore.saved import Saved, saved_layout

    def config(data: bytes) -> bool:
        text = data.decode("utf-8", "surrogateescape")
        try:
            loaded = HotConfig.from_json(text)
        except ValueError as error:
            assert str(error).startswith("text"), error
            return False
        assert HotConfig.from_json(loaded.to_json()) == loaded
        assert loaded.spec is not None  # libhot accepts the configuration
        return True

    def saved(data: bytes) -> bool:
        """Load sizes that do not fit the buffer, and any bytes if they fit."""
        if len(data) < 6:
            return False
        tokens, features = data[0] % 70, data[1] % 9
        settings = HotConfig.recipe(("default", "fast", "paper", "accurate")[data[2] % 4])
        buffer = np.frombuffer(data[6:], np.uint8)
        if data[3] % 2 and tokens * features:  # the required length
            size = saved_layout(tokens, features, settings).bytes
            buffer = np.resize(buffer if buffer.size else np.zeros(1, np.uint8), size)
        value = Saved(buffer, tokens, features, settings, Key(data[4]))
        try:
            value.codes(), value.scales(), value.exponents()
        except ValueError as error:
            assert str(error).startswith("saved"), error
            return False
        gradient = np.ones((tokens, 4), np.float32)
        weight = np.ones((4, features), np.float32)
        try:
            hotcore.backward_linear(gradient, weight, value, config=settings, key=Key(1))
        except ValueError as error:
            assert "saved" in str(error) or "aligned" in str(error), error
        return True

    return {"config": config, "saved": saved}


def seeds() -> dict[str, list[bytes]]:
    from hotcore import HotConfig
    from hotcore.config import RECIPES

    rows = HotConfig.recipe("paper", rows=(0, 3, 5), token_grid=(2, 8), prefix_tokens=2)
    configs = [HotConfig.recipe(name).to_json().encode() for name in RECIPES]
    return {
        "config": [*configs, rows.to_json().encode()],
        "saved": [bytes(range(256)), bytes([64, 8, 0, 1, 0, 0]), bytes([32, 4, 3, 1, 9, 0, 7])],
    }


ODD = [
    *(None, True, False, 0, -1, 1, 2**31, -(2**31) - 1, 2**63, 10**30, 1.5, 1e308, "", "row"),
    *("full", [], {}, [1], [[1]], [None, 1], {"a": 1}, float("nan"), float("inf"), "\ud800", 16),
]


def spoiled(data: bytes, rng: random.Random) -> bytes:
    """Change values or text at one to three places."""
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.6:
            try:
                value = json.loads(data)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict | list):
                data = json.dumps(changed(value, rng)).encode("utf-8", "surrogatepass")
                continue
        at = rng.randrange(len(data) + 1)
        added, end = (
            (b"", len(data)),
            (bytes([rng.randrange(256)]), at + 1),
            (rng.choice([b"[", b"{", b'"', b"\\", b"NaN", b"1e9"]), at),
            (data[max(0, at - rng.randrange(40)) : at], at),
            (b"[" * rng.choice([10, 20, 5000]), at),
            (b"9" * rng.choice([5, 25, 5000]), at),
        )[rng.randrange(6)]
        data = data[:at] + added + data[end:]
    return data


def changed(value: Any, rng: random.Random) -> Any:
    """Change, remove or add a value somewhere in JSON."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(ODD)
    key: Any = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    copy: Any = value.copy()
    action = rng.random()
    if action < 0.08:
        del copy[key]
    elif action < 0.16 and isinstance(copy, dict):
        copy[rng.choice(["speed", "", "rank", str(key) + "x"])] = copy[key]
    elif action < 0.2 and isinstance(copy, list):
        copy.append(copy[key])
    else:
        copy[key] = changed(value[key], rng)
    return copy


def in_turns(seconds: float, seed: int) -> dict[str, tuple[int, int]]:
    """Run all loaders for a time. Return the executions and the successful reads by loader."""
    known, start = loaders(), seeds()
    counts = {name: [0, 0] for name in known}
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    for name, load in known.items():
        for data in start[name]:
            assert load(data) or name == "saved", f"{name}: its own text is refused"
    while time.monotonic() < end:
        for name, load in known.items():
            for _ in range(50):
                data = spoiled(rng.choice(start[name]), rng)
                try:
                    read = load(data)
                except BaseException:
                    print(f"{name} broke on {data!r}", file=sys.stderr)
                    raise
                counts[name][0] += 1
                counts[name][1] += read
    return {name: (runs, read) for name, (runs, read) in counts.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    for name, (runs, read) in in_turns(options.seconds, options.seed).items():
        print(f"{name}: {runs} executions, {read} of them read")
    return 0


if __name__ == "__main__":
    # Uses the installed package, otherwise the sources with their built modules.
    if importlib.util.find_spec("hotcore") is None:
        sys.path.insert(0, str(PACKAGE))
    sys.exit(main())
