"""What reproduces the paper, the rivals, and what makes the pages of the docs.

From the repository's root, ``python -m benchmarks.evidence.doc_tables``. Modules are imported as
``evidence.X`` everywhere, so that each is there once; for that benchmarks/ goes on the path, and
examples/ for the tasks in it.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
sys.path += [
    str(path) for path in (ROOT / "benchmarks", ROOT / "examples") if str(path) not in sys.path
]
