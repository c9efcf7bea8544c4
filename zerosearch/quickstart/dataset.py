"""The quickstart's data files: questions as rows of Parquet, documents as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyarrow import parquet

from zerosearch.quickstart import Assets
from zerosearch.quickstart.documents import corpus
from zerosearch.quickstart.world import Question, World, draw_questions

DATA_SOURCE = "quickstart"
TRAIN_QUESTIONS = (720, 480)
"""One hop, two hops."""
TEST_QUESTIONS = (240, 160)

Split = Literal["train", "test"]

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("question", pa.string()),
        ("golden_answers", pa.list_(pa.string())),
        ("data_source", pa.string()),
        (
            "extra_info",
            pa.struct(
                [
                    ("split", pa.string()),
                    ("index", pa.int64()),
                    ("hops", pa.int64()),
                    ("subject", pa.string()),
                    ("relations", pa.list_(pa.string())),
                    ("bridge", pa.string()),
                ]
            ),
        ),
    ]
)


def train_questions(world: World) -> list[Question]:
    """1,200 distinct questions about the train part."""
    return draw_questions(world, "train", *TRAIN_QUESTIONS)


def test_questions(world: World) -> list[Question]:
    """400 distinct questions about the held-out part."""
    return draw_questions(world, "held_out", *TEST_QUESTIONS)


def question_row(question: Question, split: Split, index: int) -> dict[str, Any]:
    """A row of `SCHEMA`."""
    return {
        "id": f"{DATA_SOURCE}-{split}-{index}",
        "question": question.text,
        "golden_answers": [question.answer],
        "data_source": DATA_SOURCE,
        "extra_info": {
            "split": split,
            "index": index,
            "hops": len(question.facts),
            "subject": question.subject,
            "relations": list(question.relations),
            "bridge": question.bridge,
        },
    }


def write_data(world: World, assets: Assets) -> None:
    """Both Parquet files and the corpus."""
    assets.train_data.parent.mkdir(parents=True, exist_ok=True)
    _write_questions(train_questions(world), "train", assets.train_data)
    _write_questions(test_questions(world), "test", assets.test_data)
    lines = [json.dumps({"id": str(index), "contents": text}) for index, text in enumerate(corpus(world))]
    assets.corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_questions(questions: Sequence[Question], split: Split, path: Path) -> None:
    rows = [question_row(question, split, index) for index, question in enumerate(questions)]
    parquet.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
