from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verl.utils.dataset.rl_dataset import PromptFormat, RLHFDataset, StatefulLoader

FORMAT = PromptFormat(template="Answer: {question}", max_prompt_length=12)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    words = ["<unk>", "Answer", ":", "who", "is", "it", "<user>", "<assistant>", "long"]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}<{{m.role}}> {{m.content}} {% endfor %}<assistant>"
    return tokenizer


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_question_goes_into_the_template_and_messages_are_verbatim(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write(
        tmp_path / "a.parquet",
        [
            {"question": " who is it ", "prompt": None},
            {"question": "who", "prompt": [{"role": "user", "content": "it is"}]},
        ],
    )
    data = RLHFDataset([file], tokenizer, FORMAT)
    assert tokenizer.decode(data[0].prompt_ids).split() == ["<user>", "<unk>", "who", "is", "it", "<assistant>"]
    assert tokenizer.decode(data[1].prompt_ids).split() == ["<user>", "it", "is", "<assistant>"]


def test_uid_is_a_function_of_file_row_and_step(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    data = RLHFDataset([write(tmp_path / "a.parquet", [{"question": "who"}] * 2)], tokenizer, FORMAT)
    assert [row.prompt(7).uid for row in data.rows] == ["a.parquet#0@7", "a.parquet#1@7"]
    assert data[0].prompt(7).uid != data[0].prompt(8).uid


def test_overlong_prompts_are_left_out_and_listed_or_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write(tmp_path / "a.parquet", [{"question": "long " * 20}, {"question": "who"}])
    data = RLHFDataset([file], tokenizer, FORMAT)
    assert len(data) == 1
    assert data.overlong == [f"{file} row 0 (23 tokens)"]
    assert data[0].index == 1
    strict = PromptFormat("{question}", max_prompt_length=12, filter_overlong=False)
    with pytest.raises(ValueError, match=r"max_prompt_length \(12\):\n.*row 0 \(22 tokens\)"):
        RLHFDataset([file], tokenizer, strict)


def test_unusable_rows_are_named_by_file_and_row(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    def check(row: Mapping[str, Any]) -> None:
        if not row["golden_answers"]:
            raise ValueError("golden_answers is empty")

    file = write(
        tmp_path / "a.parquet",
        [{"question": "who", "golden_answers": ["x"]}, {"question": "", "golden_answers": ["x"]}]
        + [{"question": "is", "golden_answers": []}],
    )
    with pytest.raises(ValueError, match="unusable rows") as error:
        RLHFDataset([file], tokenizer, FORMAT, check)
    assert f"{file} row 1: needs 'prompt'" in str(error.value)
    assert f"{file} row 2: golden_answers is empty" in str(error.value)


def test_missing_and_damaged_files_are_named(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    broken = tmp_path / "b.parquet"
    broken.write_text("no parquet")
    for file in (tmp_path / "none.parquet", broken):
        with pytest.raises(ValueError, match=file.name):
            RLHFDataset([str(file)], tokenizer, FORMAT)


def test_loader_covers_each_epoch_and_goes_on_where_it_stood() -> None:
    loader = StatefulLoader(rows=10, batch_size=3, seed=5)
    epoch = [loader.next_batch() for _ in range(3)]
    assert len({i for batch in epoch for i in batch}) == 9
    state = loader.state_dict()
    expected = [loader.next_batch() for _ in range(4)]
    resumed = StatefulLoader(rows=10, batch_size=3, seed=5)
    resumed.load_state_dict(state)
    assert [resumed.next_batch() for _ in range(4)] == expected
    with pytest.raises(ValueError, match="10 rows"):
        StatefulLoader(rows=11, batch_size=3, seed=5).load_state_dict(state)


def test_loader_orders_differ_by_seed_and_epoch_and_keep_file_order_unshuffled() -> None:
    first = StatefulLoader(8, 8, seed=1)
    assert first.next_batch() != first.next_batch()
    assert StatefulLoader(8, 8, seed=1).next_batch() != StatefulLoader(8, 8, seed=2).next_batch()
    assert StatefulLoader(4, 2, seed=1, shuffle=False).next_batch() == [0, 1]
    with pytest.raises(ValueError, match="only 3 usable rows"):
        StatefulLoader(3, 4, seed=1)
