"""Former place of ``gather_codes``: its import raises ImportError, which says what to do."""

from ..config import GONE, REMOVED

raise ImportError(f"gather_codes: {REMOVED}; {GONE['gather_codes']}")
