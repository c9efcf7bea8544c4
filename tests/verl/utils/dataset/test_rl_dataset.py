from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verl.utils.dataset.rl_dataset import PromptFormat, RLHFDataset, RowPolicy, StatefulLoader, render_prompt
from verl.utils.dataset.row_files import read_chunks

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


def load(tokenizer: PreTrainedTokenizerBase, files: list[str], **policy: Any) -> RLHFDataset:
    return RLHFDataset(files, tokenizer, FORMAT, policy=RowPolicy(**policy))


def test_overlong_prompts_are_filtered_at_load_counted_and_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write(tmp_path / "a.parquet", [{"question": "long " * 20}] * 7 + [{"question": "who"}])
    notes = load(tokenizer, [file]).notes()
    assert notes[0].startswith(
        "7 prompts are longer than data.max_prompt_length (12) and left out:\n" + file + " row 0"
    )
    assert notes[0].endswith("… and 2 more")


WRONG = [
    ({"question": 3}, "needs 'prompt' (chat messages) or 'question' (a non-empty string), not 3"),
    ({"question": " "}, "needs 'prompt'"),
    ({"prompt": "who"}, "'prompt' is str, not a list of chat messages; for plain questions set data.question_key"),
    ({"prompt": ["who"]}, "prompt[0] is 'who', not a message"),
    ({"prompt": [{"role": "judge", "content": "x"}]}, "prompt[0] has the role 'judge'; known are system,"),
    ({"prompt": [{"role": "user", "content": None}]}, "prompt[0] has no text as content but None"),
    ({"prompt": [None]}, "prompt[0] is None"),
    ({"prompt": [{"role": "assistant", "content": "x"}]}, "ends with the assistant's message"),
    ({"extra_info": "text"}, "'extra_info' is 'text', not a mapping"),
]


@pytest.mark.parametrize(("row", "message"), WRONG)
def test_rows_of_wrong_types_are_refused_in_words(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], message: str
) -> None:
    file = write(tmp_path / "a.parquet", [row])
    with pytest.raises(ValueError, match="unusable rows") as error:
        load(tokenizer, [file])
    assert f"{file} row 0: " in str(error.value)
    assert message in str(error.value)


def test_unusable_rows_are_left_out_where_that_is_configured(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write(tmp_path / "a.parquet", [{"question": ""}, {"question": "who"}, {"question": None}])
    data = load(tokenizer, [file], invalid="filter")
    assert [row.index for row in data.rows] == [1]
    assert data.notes()[0].startswith(f"2 rows cannot be used and are left out:\n{file} row 0: needs 'prompt'")
    only_bad = write(tmp_path / "b.parquet", [{"question": ""}])
    with pytest.raises(ValueError, match=r"no usable rows in .*\(1 cannot be used"):
        load(tokenizer, [only_bad], invalid="filter")


def test_a_template_that_refuses_a_message_refuses_the_row(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    file = write(tmp_path / "a.parquet", [{"prompt": [{"role": r, "content": "who"} for r in ("system", "user")]}])
    with pytest.raises(ValueError, match="row 0: the chat template refuses the messages: no system"):
        load(strict, [file])


def test_repeated_rows_are_kept_dropped_or_refused_and_always_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [("who", ["x"]), ("is", ["x"]), ("who", ["x"]), ("who", ["y"])]
    file = write(tmp_path / "a.parquet", [{"question": q, "golden_answers": g} for q, g in rows])
    assert [row.index for row in load(tokenizer, [file]).rows] == [0, 1, 2, 3]
    dropped = load(tokenizer, [file], duplicate="drop")
    assert [row.index for row in dropped.rows] == [0, 1, 3]
    assert dropped.notes() == [
        f"1 rows repeat an earlier one and are left out:\n{file} row 2 repeats {file} row 0",
    ]
    assert "are kept" in load(tokenizer, [file]).notes()[0]
    with pytest.raises(ValueError, match=r"rows given twice .*:\n.*row 2 repeats"):
        load(tokenizer, [file], duplicate="refuse")


def test_rows_in_two_data_sets_are_found(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first = load(tokenizer, [write(tmp_path / "a.parquet", [{"question": "who"}, {"question": "is"}])])
    second = load(tokenizer, [write(tmp_path / "b.parquet", [{"question": "it"}, {"question": "is"}])])
    assert first.shared_with(second) == [f"{tmp_path}/b.parquet row 1 is also {tmp_path}/a.parquet row 1"]


def test_two_kinds_of_prompt_in_one_data_set_are_told(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    own = {"question": None, "prompt": [{"role": "user", "content": "it is"}]}
    file = write(tmp_path / "a.parquet", [own, {"question": "who", "prompt": None}])
    assert "1 of 2 rows bring chat messages of their own" in load(tokenizer, [file]).notes()[0]


def test_json_lines_hold_the_same_rows_as_parquet(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"question": "who", "golden_answers": ["x"]}, {"question": "is", "golden_answers": [1]}]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert [row.values for row in load(tokenizer, [str(lines)]).rows] == rows
    lines.write_text('{"question": "who"}\n{"question": ')
    with pytest.raises(ValueError, match=r"a\.jsonl' line 2 is not JSON"):
        load(tokenizer, [str(lines)])
    lines.write_text("[1]")
    with pytest.raises(ValueError, match="line 1 is not a JSON object"):
        load(tokenizer, [str(lines)])


def test_empty_files_and_files_of_other_forms_are_named(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    empty = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), empty)
    with pytest.raises(ValueError, match=r"a\.parquet' holds no rows"):
        load(tokenizer, [str(empty)])
    table = tmp_path / "a.csv"
    table.write_text("question\nwho\n")
    with pytest.raises(ValueError, match=r"not readable as Parquet.*to_parquet"):
        load(tokenizer, [str(table)])


def test_files_of_one_name_give_different_uids(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    files = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        files.append(write(tmp_path / folder / "train.parquet", [{"question": "who"}]))
    uids = [row.prompt(3).uid for row in load(tokenizer, files).rows]
    assert uids == ["one/train.parquet#0@3", "two/train.parquet#0@3"]
    with pytest.raises(ValueError, match="listed twice"):
        load(tokenizer, [files[0], files[0]])


def test_batched_tokenisation_gives_the_ids_of_single_prompts_across_chunks(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.utils.dataset.row_files.read_chunks.__defaults__", (3,))
    questions = ["who", "who is it", "is", "it is", "long who", "it", "who who"]
    data = load(tokenizer, [write(tmp_path / "a.parquet", [{"question": q} for q in questions])])
    expected = [render_prompt(tokenizer, FORMAT.messages({"question": question})) for question in questions]
    assert [row.prompt_ids for row in data.rows] == [tuple(tokenizer(text)["input_ids"]) for text in expected]
    assert [row.index for row in data.rows] == list(range(7))


def test_max_samples_are_the_first_usable_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = write(tmp_path / "a.parquet", [{"question": q} for q in ("long " * 20, "who", "is", "it")])
    assert [row.index for row in RLHFDataset([file], tokenizer, FORMAT, max_samples=2).rows] == [1, 2]


def test_json_lines_of_another_encoding_are_named_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"question": "a"}\n' + '{"question": "é"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"rows\.jsonl' line 2 is not UTF-8"):
        list(read_chunks(str(file)))
