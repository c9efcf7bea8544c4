"""What is shipped: small, loadable, made by the code beside it, and good enough to learn from."""

from __future__ import annotations

import json

import pytest
import torch
from pyarrow import parquet
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM

from zerosearch.prompts import (
    check_plain_encoding,
    encode_plain,
    load_prompt_template,
    load_simulation_template,
    render_information,
)
from zerosearch.quickstart import ASSETS, Assets
from zerosearch.quickstart.dataset import SCHEMA, question_row, train_questions, write_data
from zerosearch.quickstart.dataset import test_questions as held_out_questions
from zerosearch.quickstart.documents import corpus
from zerosearch.quickstart.local_search import write_replies
from zerosearch.quickstart.templates import POLICY_PROMPT, SIMULATION_PROMPT, TAGS
from zerosearch.quickstart.tokenizer import encode, encode_prompt, train_tokenizer
from zerosearch.quickstart.world import World, build_world
from zerosearch.search.backend import Label

SHIPPED_SEED = 1
MODELS = [ASSETS.policy, ASSETS.simulator]


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(SHIPPED_SEED)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(ASSETS.policy)


def test_all_assets_together_are_under_8_megabytes() -> None:
    assert sum(path.stat().st_size for path in ASSETS.root.rglob("*") if path.is_file()) < 8_000_000


def test_questions_and_corpus_are_what_the_world_makes(world: World) -> None:
    for questions, split, path in (
        (train_questions(world), "train", ASSETS.train_data),
        (held_out_questions(world), "test", ASSETS.test_data),
    ):
        table = parquet.read_table(path)
        assert table.schema.equals(SCHEMA)
        assert table.to_pylist() == [question_row(q, split, i) for i, q in enumerate(questions)]
    lines = [json.loads(line) for line in ASSETS.corpus.read_text().splitlines()]
    assert [line["contents"] for line in lines] == corpus(world)


def test_data_files_are_written_alike(world: World, tmp_path) -> None:
    write_data(world, Assets(tmp_path))
    for mine, shipped in (
        (Assets(tmp_path).test_data, ASSETS.test_data),
        (Assets(tmp_path).train_data, ASSETS.train_data),
    ):
        assert parquet.read_table(mine).equals(parquet.read_table(shipped))
    assert Assets(tmp_path).corpus.read_bytes() == ASSETS.corpus.read_bytes()


def test_templates_are_those_that_the_models_were_trained_on() -> None:
    assert load_prompt_template(str(ASSETS.policy_prompt)).text == POLICY_PROMPT
    assert load_simulation_template(str(ASSETS.simulation_prompt)).text == SIMULATION_PROMPT


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_models_are_ordinary_small_checkpoints(path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(path)
    assert 0.75e6 < sum(p.numel() for p in model.parameters()) < 0.85e6
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.tie_word_embeddings
    loaded = PreTrainedTokenizerFast.from_pretrained(path)
    assert GenerationConfig.from_pretrained(path).eos_token_id == loaded.eos_token_id == model.config.eos_token_id
    assert loaded.pad_token_id != loaded.eos_token_id


def test_both_models_share_the_tokenizer_that_the_seed_makes(world: World, tokenizer: PreTrainedTokenizerFast) -> None:
    assert PreTrainedTokenizerFast.from_pretrained(ASSETS.simulator).get_vocab() == tokenizer.get_vocab()
    assert train_tokenizer(world).get_vocab() == tokenizer.get_vocab()


def test_tags_are_single_ordinary_tokens_and_documents_stay_plain_text(tokenizer: PreTrainedTokenizerFast) -> None:
    check_plain_encoding(tokenizer)
    assert all(len(encode(tokenizer, tag)) == 1 for tag in TAGS)
    assert not set(tokenizer.convert_tokens_to_ids(list(TAGS))) & set(tokenizer.all_special_ids)
    text = render_information(["Anna Abel was born in Port Kelda."])
    assert list(encode_plain(tokenizer, text)) == encode(tokenizer, text)


def test_the_chat_begins_the_assistant_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.decode(encode_prompt(tokenizer, "Hello"))
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_the_simulator_knows_held_out_facts_and_keeps_labels_apart(
    world: World, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = Qwen2ForCausalLM.from_pretrained(ASSETS.simulator)
    facts = world.facts("held_out")[::8]
    queries = [f"{fact.relation} of {fact.subject}" for fact in facts]
    useful = write_replies(model, tokenizer, [(query, Label.USEFUL) for query in queries], seed=0)
    noisy = write_replies(model, tokenizer, [(query, Label.NOISY) for query in queries], seed=0)
    assert sum(fact.value in text for fact, text in zip(facts, useful, strict=True)) >= 0.9 * len(facts)
    assert sum(fact.value in text for fact, text in zip(facts, noisy, strict=True)) <= 0.1 * len(facts)
    assert all(text.startswith("Doc 1: ") for text in useful + noisy)
