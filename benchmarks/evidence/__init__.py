"""Reproduction of the paper, rivals, and the scripts that write tables of the docs.

Scripts run from the repository's root, for example ``python -m benchmarks.evidence.doc_tables``.
This file adds benchmarks/ and examples/ to the path. Every module is imported as ``evidence.X``, so
that it exists once.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
sys.path += [
    str(path) for path in (ROOT / "benchmarks", ROOT / "examples") if str(path) not in sys.path
]
