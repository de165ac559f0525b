"""CITATION.cff, CHANGELOG, package and module agree on what this is."""

from __future__ import annotations

import re
import tomllib

import pytest

import dustin
from tests.docs.running import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version() -> None:
    assert PROJECT["version"] == dustin.__version__
    assert re.search(rf"^## {re.escape(dustin.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_the_citation_is_valid() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(citation)
    assert citation["version"] == dustin.__version__ and citation["license"] == PROJECT["license"]
    paper = citation["preferred-citation"]
    assert paper["url"].endswith("2606.24957") and len(paper["authors"]) == 9
    # The README cites the same people.
    readme = (ROOT / "README.md").read_text()
    assert all(f"{author['family-names']}, {author['given-names']}" in readme for author in paper["authors"])
    assert paper["title"] in readme


def test_extras_in_the_readme_exist() -> None:
    named = re.findall(r"\[(\w+)\](?!\()", (ROOT / "README.md").read_text())
    assert "serve" in named and set(named) <= set(PROJECT["optional-dependencies"])
