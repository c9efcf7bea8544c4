from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verl.utils.tokenizer import eos_token_ids, hf_tokenizer, template_notes, tokenizer_problems

CHATML = "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}"


def saved(directory: Path, template: str | None = CHATML, **special: str) -> str:
    words = ["<unk>", "<pad>", "<end>", "<stop>", *"abc"]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return str(directory)


def load(directory: Path, template: str | None = CHATML, **special: str) -> PreTrainedTokenizerBase:
    return hf_tokenizer(saved(directory, template, **({"eos_token": "<end>"} | special)))


def test_a_tokenizer_without_pad_takes_its_end_of_sequence(tmp_path: Path) -> None:
    assert load(tmp_path).pad_token_id == 2
    assert load(tmp_path / "own", pad_token="<pad>").pad_token_id == 1


def test_a_tokenizer_with_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a pad nor an end-of-sequence token"):
        hf_tokenizer(saved(tmp_path))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be loaded"):
        hf_tokenizer(str(tmp_path))


def test_several_end_of_sequence_ids_are_one_set(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, eos_token="<stop>", additional_special_tokens=["<end>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert eos_token_ids(str(tmp_path), tokenizer) == {2, 3, 5, 6}


def test_ids_beyond_the_models_vocabulary_are_a_problem(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer_problems(tokenizer, 7, frozenset({2})) == []
    assert tokenizer_problems(tokenizer, None, frozenset({2})) == []
    (problem,) = tokenizer_problems(tokenizer, 6, frozenset({2}))
    assert "ids up to 6, the model's vocabulary has 6 entries" in problem
    (problem,) = tokenizer_problems(tokenizer, 7, frozenset({9}))
    assert "ids up to 9" in problem


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "nothing"])
def test_a_template_that_refuses_or_drops_user_messages_is_a_problem(tmp_path: Path, template: str) -> None:
    (problem,) = tokenizer_problems(load(tmp_path, template), 7, frozenset({2}))
    assert "data.chat_template=FILE" in problem


def test_templates_that_open_or_remove_think_or_are_missing_are_told(tmp_path: Path) -> None:
    opens = CHATML + "{% if add_generation_prompt %}assistant <think>\n{% endif %}"
    removes = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert template_notes(load(tmp_path / "plain")) == []
    assert "opens <think>" in template_notes(load(tmp_path / "opens", opens))[0]
    assert "removes <think>" in template_notes(load(tmp_path / "removes", removes))[0]
    bare = load(tmp_path / "bare", None)
    assert template_notes(bare) == ["the tokenizer has no chat template: prompts are plain text"]
    assert template_notes(bare, "never") == []
