"""Which searches are answered with noisy documents, and with which random seed documents are written."""

from __future__ import annotations

from typing import Literal

from zerosearch.search.backend import Label, SearchRequest
from zerosearch.text import normalize_text

Draw = Literal["trajectory", "call"]
"""``trajectory``: a repeated query meets the same label and the same documents, as with a search
engine. ``call``: each search tosses a new coin (the paper's way), which rewards repeating."""

_SEED_BITS = 31


def query_identity(request: SearchRequest, draw: Draw) -> tuple[str, ...]:
    """What tells one search of a trajectory from another."""
    query = normalize_text(request.query)
    return (query, str(request.turn)) if draw == "call" else (query,)


def draw_label(request: SearchRequest, draw: Draw) -> Label:
    """NOISY with the request's noise probability: a hash of (seed, step, uid, sample, normalised query)."""
    number = (request.key.stream("noise", *query_identity(request, draw)) >> 11) / 2**53
    return Label.NOISY if number < request.noise_probability else Label.USEFUL


def document_seed(request: SearchRequest, draw: Draw, attempt: int) -> int:
    """The seed sent to the simulation LLM; 31 bits, which every server takes."""
    return request.key.stream("documents", *query_identity(request, draw), attempt) & (2**_SEED_BITS - 1)
