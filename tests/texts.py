"""Texts for properties."""

from __future__ import annotations

from hypothesis import strategies as st

# All of UTF-8: with codec="utf-8", or without an alphabet, hypothesis first encodes each of a million
# characters.
CHARACTERS = st.characters(exclude_categories=["Cs"])
