"""CITATION.cff and the BibTeX of docs/paper.md name the version that pyproject.toml has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def found(path: str, pattern: str) -> str:
    (text,) = re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    return text


def test_version() -> None:
    version = found("pyproject.toml", r'^version = "([^"]+)"')
    assert found("CITATION.cff", r"^version: (\S+)$") == version
    assert found("docs/paper.md", r"^ +version = \{([^}]+)\}") == version


def test_fields() -> None:
    """The fields that the schema of the Citation File Format 1.2.0 requires."""
    yaml = pytest.importorskip("yaml")
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cff["cff-version"] == "1.2.0" and cff["type"] == "software"
    assert cff["message"] and cff["title"] and all("name" in author for author in cff["authors"])
    (paper,) = cff["references"]
    assert paper["authors"] and paper["title"] and paper["type"] == "conference-paper"
    assert paper["conference"]["name"] and paper["identifiers"][0]["value"] == "arXiv:2503.21261"
    assert found("docs/paper.md", r"^ +eprint += \{([^}]+)\}") in paper["url"]
