"""The one normalisation of answers and queries."""

from __future__ import annotations

import re
import unicodedata

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_text(text: str) -> str:
    """NFKC, lower case, punctuation deleted, no articles unless nothing else remains, single spaces.

    Punctuation is deleted and not replaced by a space, as SQuAD's evaluation does ("U.S." is "us").
    """
    folded = unicodedata.normalize("NFKC", text).lower()
    bare = "".join(c for c in folded if unicodedata.category(c)[0] != "P" and c not in "$+<=>^`|~")
    return " ".join(_ARTICLES.sub(" ", bare).split()) or " ".join(bare.split())
