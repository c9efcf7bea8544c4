"""The engine as agent loops see it: same results in any company, stops, sessions, failures."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl.workers.rollout.engine import Generation, GenerationRequest, InfrastructureError, SamplingParams, StopReason
from verl.workers.rollout.torch_engine import TorchEngine

MakeEngine = Callable[..., TorchEngine]


async def generate_all(engine: TorchEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def random_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(256) for _ in range(count))


def groups(seed: int) -> list[GenerationRequest]:
    """Five prompts of very different lengths, up to four samples each, with mixed sampling."""
    rng = random.Random(seed)
    requests = []
    for prompt, length in enumerate((1, 20, 127, 128, 270)):
        ids = random_ids(rng, length)
        for sample in range(rng.randrange(1, 5)):
            temperature, top_p = rng.choice([(1.0, 1.0), (0.7, 1.0), (0.0, 1.0), (1.0, 0.9)])
            sampling = SamplingParams(temperature, top_p, max_tokens=rng.randrange(1, 40), stop=("a", "</s>"))
            requests.append(GenerationRequest(f"{prompt}/{sample}", ids, sampling, stream=rng.getrandbits(64)))
    return requests


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
async def test_results_are_the_same_bits_in_any_company(
    name: str, request: pytest.FixtureRequest, make_engine: MakeEngine
) -> None:
    """Alone, all at once, in any order, with any number of slots, trickling in."""
    model = request.getfixturevalue(name)
    requests = groups(seed=3)
    alone = {}
    engine = make_engine(model, max_num_seqs=1)
    for one in requests:
        alone[one.session] = await engine.generate(one)
    for slots in (1, 3, 7, 64):
        rng = random.Random(slots)
        order = rng.sample(requests, len(requests))
        together = await generate_all(
            make_engine(model, max_num_seqs=slots, max_model_len=rng.choice([310, 400])), order
        )
        assert {r.session: g for r, g in zip(order, together, strict=True)} == alone

    trickling = make_engine(model, max_num_seqs=5)

    async def later(one: GenerationRequest, turns: int) -> Generation:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await trickling.generate(one)

    rng = random.Random(9)
    trickled = await asyncio.gather(*(later(one, rng.randrange(200)) for one in requests))
    assert {r.session: g for r, g in zip(requests, trickled, strict=True)} == alone


async def test_bfloat16_results_are_the_same_bits_in_any_company(
    llama: PreTrainedModel, make_engine: MakeEngine
) -> None:
    requests = groups(seed=4)
    one_slot = make_engine(llama, dtype=torch.bfloat16, max_num_seqs=1)
    alone = [await one_slot.generate(one) for one in requests]
    assert await generate_all(make_engine(llama, dtype=torch.bfloat16, max_num_seqs=9), requests) == alone


async def test_results_are_the_same_bits_with_two_threads(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    requests = groups(seed=5)
    torch.set_num_threads(2)
    try:
        one_slot = make_engine(llama, max_num_seqs=1)
        alone = [await one_slot.generate(one) for one in requests[:6]]
        assert (await generate_all(make_engine(llama, max_num_seqs=9), requests))[:6] == alone
    finally:
        torch.set_num_threads(1)


async def conversation(
    engine: TorchEngine, session: str, stream: int, *, turns: int = 3, keep: bool = True
) -> list[Generation]:
    """Turns with observations between them; without ``keep`` the engine forgets after each."""
    rng = random.Random(stream)
    ids = random_ids(rng, 60)
    generations = []
    for _ in range(turns):
        sampling = SamplingParams(max_tokens=rng.randrange(5, 40), stop=("</s>",))
        generations.append(await engine.generate(GenerationRequest(session, ids, sampling, stream)))
        ids += generations[-1].token_ids + random_ids(rng, rng.randrange(0, 50))
        if not keep:
            await engine.release(session)
        await asyncio.sleep(0.001 * rng.randrange(3))
    await engine.release(session)
    return generations


@pytest.mark.parametrize("name", ["llama", "qwen2"])
async def test_kept_keys_and_values_change_speed_only(
    name: str, request: pytest.FixtureRequest, make_engine: MakeEngine
) -> None:
    """A session that is kept, forgotten after every turn, or evicted gives the same bits."""
    model = request.getfixturevalue(name)
    kept, forgotten = make_engine(model), make_engine(model)
    expected = [await conversation(kept, f"k{i}", i) for i in range(6)]
    assert [await conversation(forgotten, f"f{i}", i, keep=False) for i in range(6)] == expected
    assert kept.stats.reused_tokens > 0
    assert forgotten.stats.reused_tokens == 0
    assert kept.stats.prefill_tokens < forgotten.stats.prefill_tokens / 2
    crowded = make_engine(model, max_num_seqs=1, max_model_len=320)
    assert list(await asyncio.gather(*(conversation(crowded, f"c{i}", i) for i in range(6)))) == expected
    roomy = make_engine(model, max_num_seqs=6)
    await asyncio.gather(*(conversation(roomy, f"r{i}", i) for i in range(6)))
    assert roomy.stats.prefill_tokens < crowded.stats.prefill_tokens


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
async def test_log_probs_are_hugging_faces_over_three_turns(
    name: str, request: pytest.FixtureRequest, make_engine: MakeEngine
) -> None:
    """Sampler log-probabilities with kept keys and values against a full forward of the final context."""
    model = request.getfixturevalue(name)
    engine = make_engine(model)
    rng = random.Random(5)
    ids = random_ids(rng, 70)
    turns = []
    for _ in range(3):
        sampling = SamplingParams(temperature=0.8, max_tokens=30)
        generation = await engine.generate(GenerationRequest("s", ids, sampling, stream=11))
        turns.append((len(ids), generation))
        ids += generation.token_ids + random_ids(rng, 25)
    with torch.inference_mode():
        reference = (model(torch.tensor([ids])).logits[0] / 0.8).log_softmax(-1)
    for start, generation in turns:
        rows = reference[start - 1 : start - 1 + len(generation.token_ids)]
        expected = rows.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(generation.log_probs, expected.numpy(), atol=5e-5)
    assert engine.stats.reused_tokens >= 70 + 30


async def test_a_groups_prompt_is_computed_once(qwen2: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(qwen2, max_num_seqs=3)
    prompt = random_ids(random.Random(0), 200)
    sampling = SamplingParams(max_tokens=4)

    async def sample(number: int) -> None:
        await engine.generate(GenerationRequest(f"s{number}", prompt, sampling, stream=number))
        await engine.release(f"s{number}")

    await asyncio.gather(*(sample(number) for number in range(8)))
    assert engine.stats.prefill_tokens == 200 + 7
    assert engine.stats.reused_tokens == 7 * 199


async def test_a_context_that_changed_starts_again(qwen2: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine, fresh = make_engine(qwen2), make_engine(qwen2)
    sampling = SamplingParams(max_tokens=8)
    first = random_ids(random.Random(1), 50)
    await engine.generate(GenerationRequest("s", first, sampling, stream=1))
    changed = (*first[:20], (first[20] + 1) % 256, *first[21:], 7, 8)
    request = GenerationRequest("s", changed, sampling, stream=1)
    assert await engine.generate(request) == await fresh.generate(request)
    again = GenerationRequest("s", first, sampling, stream=1)
    assert await engine.generate(again) == await fresh.generate(replace(again, session="t"))


async def test_the_same_context_twice_gives_the_same_tokens(qwen2: PreTrainedModel, make_engine: MakeEngine) -> None:
    """A turn asked again (its caller failed) may find more cached than its context holds."""
    engine = make_engine(qwen2)
    request = GenerationRequest("s", random_ids(random.Random(1), 30), SamplingParams(max_tokens=20), stream=1)
    assert await engine.generate(request) == await engine.generate(request)


def peaked(model: PreTrainedModel, successor: dict[int, int]) -> PreTrainedModel:
    """A model that follows ``successor`` from token to token: attention and MLP off, a chosen head."""
    config = type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": False, "hidden_size": 64})
    made = type(model)(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        torch.manual_seed(0)
        states = functional.normalize(torch.randn(config.vocab_size, 64))
        made.model.embed_tokens.weight.copy_(states)
        made.lm_head.weight.zero_()
        for token, following in successor.items():
            made.lm_head.weight[following] += 20 * states[token]
    return made


def spelled(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[tuple[int, ...], dict[int, int]]:
    """Ids of a text without repeated tokens and the successor table that writes it."""
    ids = tuple(tokenizer(text)["input_ids"])
    assert len(set(ids)) == len(ids)
    return ids, dict(itertools.pairwise(ids))


async def greedy(engine: TorchEngine, start: int, stop: tuple[str, ...] = (), max_tokens: int = 30) -> Generation:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, stop=stop)
    return await engine.generate(GenerationRequest("s", (start,), sampling, stream=0))


async def test_generation_stops_at_the_closing_tag_and_keeps_its_token(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, make_engine: MakeEngine
) -> None:
    """No tokens past the tag; the token that completes it is whole, characters after the tag included."""
    ids, successor = spelled(tokenizer, "q1</search>\n tuvwyz")
    engine = make_engine(peaked(llama, successor))
    generation = await greedy(engine, ids[0], stop=("</answer>", "</search>"))
    assert generation.stop_reason is StopReason.STOP_STRING
    assert generation.stop_string == "</search>"
    assert tokenizer.decode(list(generation.token_ids)) == "1</search>\n"
    assert generation.token_ids == ids[1 : 1 + len(generation.token_ids)]
    assert len(generation.log_probs) == len(generation.token_ids)
    assert generation.weights_versions == ((0, len(generation.token_ids)),)


async def test_a_stop_string_in_the_context_does_not_count(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, make_engine: MakeEngine
) -> None:
    """Neither a whole one nor one that generation would only finish."""
    ids, successor = spelled(tokenizer, "q1</s>tuvw")
    engine = make_engine(peaked(llama, successor))
    before_last = ids.index(tokenizer.convert_tokens_to_ids(">"))
    sampling = SamplingParams(temperature=0, max_tokens=4, stop=("</s>",))
    generation = await engine.generate(GenerationRequest("s", ids[:before_last], sampling, stream=0))
    assert tokenizer.decode(list(generation.token_ids)) == ">tuv"
    assert generation.stop_reason is StopReason.LENGTH


async def test_every_end_of_sequence_id_ends_a_generation(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, make_engine: MakeEngine
) -> None:
    """All the ids given, not the tokenizer's one; the sampled id is kept, with its log-probability."""
    ids, successor = spelled(tokenizer, "qrstuv")
    engine = make_engine(peaked(llama, successor), eos_token_ids=[ids[3], ids[5]])
    generation = await greedy(engine, ids[0], stop=("z",))
    assert generation.token_ids == ids[1:4]
    assert generation.stop_reason is StopReason.END_OF_SEQUENCE
    assert generation.stop_string is None
    assert len(generation.log_probs) == 3


async def test_length_ends_at_max_tokens_and_where_the_context_is_full(
    qwen2: PreTrainedModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(qwen2, max_model_len=50)
    prompt = random_ids(random.Random(0), 40)
    short = await engine.generate(GenerationRequest("a", prompt, SamplingParams(max_tokens=4), stream=0))
    full = await engine.generate(GenerationRequest("b", prompt, SamplingParams(max_tokens=400), stream=0))
    assert (len(short.token_ids), short.stop_reason) == (4, StopReason.LENGTH)
    assert (len(full.token_ids), full.stop_reason) == (10, StopReason.LENGTH)
    assert full.token_ids[:4] == short.token_ids
    last = await engine.generate(GenerationRequest("c", random_ids(random.Random(1), 49), SamplingParams(), stream=0))
    assert len(last.token_ids) == 1


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (GenerationRequest("s", (), SamplingParams(), 0), "context of 0"),
        (GenerationRequest("s", (1,) * 50, SamplingParams(), 0), "max_model_len 50"),
        (GenerationRequest("s", (1, 320), SamplingParams(), 0), "0..319"),
        (GenerationRequest("s", (1, -1), SamplingParams(), 0), "0..319"),
        (GenerationRequest("s", (1,), SamplingParams(), -1), "64-bit"),
        (GenerationRequest("s", (1,), SamplingParams(stop=("",)), 0), "stop string is empty"),
    ],
)
async def test_impossible_requests_are_refused_and_harm_nothing(
    qwen2: PreTrainedModel, make_engine: MakeEngine, request_: GenerationRequest, said: str
) -> None:
    engine = make_engine(qwen2, max_model_len=50)
    with pytest.raises(ValueError, match=said):
        await engine.generate(request_)
    good = GenerationRequest("s", (1,), SamplingParams(max_tokens=2), 0)
    assert len((await engine.generate(good)).token_ids) == 2


async def test_a_cancelled_request_frees_its_slot_and_disturbs_nobody(
    qwen2: PreTrainedModel, make_engine: MakeEngine
) -> None:
    requests = [
        GenerationRequest(f"s{i}", random_ids(random.Random(i), 20 + 30 * i), SamplingParams(max_tokens=60), stream=i)
        for i in range(5)
    ]
    expected = await generate_all(make_engine(qwen2), requests)
    engine = make_engine(qwen2, max_num_seqs=2)
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    while engine.stats.steps < 5:
        await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[3].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert isinstance(results[3], asyncio.CancelledError)
    assert [results[i] for i in (1, 2, 4)] == [expected[i] for i in (1, 2, 4)]
    assert await engine.generate(requests[0]) == expected[0]


async def test_a_failing_step_fails_every_request_with_its_cause(
    qwen2: PreTrainedModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(qwen2, max_num_seqs=2)
    with torch.no_grad():
        engine._model.final_norm.fill_(torch.nan)
    requests = [GenerationRequest(f"s{i}", (1, 2, i), SamplingParams(max_tokens=5), stream=i) for i in range(4)]
    results = await asyncio.wait_for(
        asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True), timeout=60
    )
    assert all(isinstance(result, InfrastructureError) for result in results)
    assert all("not finite" in str(result) and result.__cause__ is not None for result in results)
    with pytest.raises(InfrastructureError, match="out of order"):
        await engine.generate(requests[0])
    await engine.begin_weights(1)
    await engine.load_weights(qwen2.state_dict().items())
    await engine.end_weights(1)
    assert (await engine.generate(requests[0])).weights_versions == ((1, 5),)


async def test_release_of_unknown_sessions_is_ignored(qwen2: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(qwen2)
    request = GenerationRequest("s", (1, 2, 3), SamplingParams(max_tokens=5), stream=4)
    before = await engine.generate(request)
    await engine.release("never seen")
    assert await engine.generate(request) == before


def test_one_engine_serves_event_loops_in_turn(qwen2: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(qwen2)
    request = GenerationRequest("s", (1, 2, 3), SamplingParams(max_tokens=5), stream=4)
    assert asyncio.run(engine.generate(request)) == asyncio.run(engine.generate(request))
