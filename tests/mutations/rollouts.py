"""Faults of trajectories: what is asked, sampled, parsed and scored."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.mutations.mutation import Mutation, everywhere
from verl.agent_loop.base import RewardFn
from verl.agent_loop.trajectory import Prompt, Segment, SegmentKind, Trajectory
from verl.trainer import run_dir
from verl.utils.dataset.rl_dataset import Row
from verl.workers.rollout.engine import Generation, GenerationRequest, SamplingParams, StopReason
from zerosearch import agent_loop, reward, turns
from zerosearch.actions import STOP_STRINGS, Action, ActionKind, InvalidKind, parse_action
from zerosearch.agent_loop import SearchAgentLoop
from zerosearch.prompts import encode_plain
from zerosearch.reward import Scores
from zerosearch.search.backend import SearchRequest
from zerosearch.text import normalize_text
from zerosearch.turns import Turns

LOOP = "tests/zerosearch/test_agent_loop.py::"
REWARD = "tests/zerosearch/test_reward.py"
ACTIONS = "tests/zerosearch/test_actions.py"
PROMPTS = "tests/zerosearch/test_prompts.py::"
DATASET = "tests/verl/utils/dataset/test_rl_dataset.py::"
STEP = "tests/verl/trainer/ppo/test_regressions.py::"


def another_rows_question(patch: pytest.MonkeyPatch) -> None:
    rows: list[Turns] = []
    number = itertools.count()
    begin = Turns.__post_init__

    def begin_counted(self: Turns) -> None:
        rows.append(self)
        begin(self)

    def paired_by_position(**given: Any) -> SearchRequest:
        row = rows[next(number) % len(rows)].episode
        return SearchRequest(**{**given, "question": row.question, "golden_answers": row.golden_answers})

    patch.setattr(Turns, "__post_init__", begin_counted)
    patch.setattr(turns, "SearchRequest", paired_by_position)


def _parse_answers_of(patch: pytest.MonkeyPatch, ids_of: Callable[[Turns], Iterable[int]]) -> None:
    rewarded = SearchAgentLoop._rewarded

    async def rewarded_by_text(self: SearchAgentLoop, run: Turns, function: RewardFn) -> Trajectory:
        text = str(self.context.tokenizer.decode(list(ids_of(run))))
        found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        run.episode = replace(run.episode, answer=found[-1].strip() if found else None)
        return await rewarded(self, run, function)

    patch.setattr(SearchAgentLoop, "_rewarded", rewarded_by_text)


def answer_read_from_the_prompt(patch: pytest.MonkeyPatch) -> None:
    def prompt_and_policy(run: Turns) -> Iterable[int]:
        policy = (segment.token_ids for segment in run.segments if segment.kind is SegmentKind.POLICY)
        return itertools.chain(run.task.prompt.prompt_ids, *policy)

    _parse_answers_of(patch, prompt_and_policy)


def answer_read_from_documents(patch: pytest.MonkeyPatch) -> None:
    def policy_and_documents(run: Turns) -> Iterable[int]:
        kept = (segment.token_ids for segment in run.segments if not isinstance(segment.info, InvalidKind))
        return itertools.chain.from_iterable(kept)

    _parse_answers_of(patch, policy_and_documents)


def no_answer_is_an_error(patch: pytest.MonkeyPatch) -> None:
    score = reward.score_answer

    def score_any(answer: str | None, golds: tuple[str, ...]) -> Scores:
        normalize_text(answer)  # type: ignore[arg-type]
        return score(answer, golds)

    everywhere(patch, score, score_any)


def exact_match_is_substring_match(patch: pytest.MonkeyPatch) -> None:
    score = reward._score_one

    def score_by_substring(predicted: list[str], gold: list[str]) -> Scores:
        return replace(score(predicted, gold), em=float(" ".join(gold) in " ".join(predicted)))

    everywhere(patch, score, score_by_substring)


def f1_of_a_record_holds_em(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent_loop, "asdict", lambda scores: asdict(scores) | {"f1": scores.em})


def f1_of_a_dump_holds_em(patch: pytest.MonkeyPatch) -> None:
    describe = run_dir.describe

    def describe_em_twice(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        told = describe(trajectory, tokenizer)
        return told | {"scores": told["scores"] | {"f1": told["scores"]["em"]}}

    everywhere(patch, describe, describe_em_twice)


def response_tokenised_again(patch: pytest.MonkeyPatch) -> None:
    generate = Turns._generate

    async def generate_again(self: Turns) -> Action:
        action = await generate(self)
        segment = self.segments[-1]
        tokenizer = self.rules.tokenizer
        text = str(tokenizer.decode(list(segment.token_ids), skip_special_tokens=True))
        cut = re.match(r".*?</(search|answer)>", text, re.DOTALL)
        ids = encode_plain(tokenizer, cut[0] if cut else text)
        log_probs = (segment.log_probs + (0.0,) * len(ids))[: len(ids)]
        self.segments[-1] = Segment(SegmentKind.POLICY, ids, log_probs, ((0, len(ids)),))
        return action

    patch.setattr(Turns, "_generate", generate_again)


def context_and_training_cut_at_different_ends(patch: pytest.MonkeyPatch) -> None:
    run = Turns.run

    async def run_without_end(self: Turns) -> None:
        budget, self._remaining = self._remaining, 1 << 30
        await run(self)
        segments, self.segments = self.segments, []
        for segment in segments:
            size = min(len(segment.token_ids), budget)
            budget -= size
            policy = segment.kind is SegmentKind.POLICY
            kept = replace(
                segment,
                token_ids=segment.token_ids[:size],
                log_probs=segment.log_probs[:size],
                weights_versions=((0, size),) if policy else (),
            )
            self.segments += [kept] if size else []

    async def continue_the_end(self: Turns, room: int) -> Generation:
        window = tuple(self._context[-self.rules.limits.max_response_length :])
        sampling = replace(self.task.sampling, max_tokens=room, stop=STOP_STRINGS)
        request = GenerationRequest(self.task.session, window, sampling, self.task.key.stream("policy"))
        part = await self.engine.generate(request)
        self._context.extend(part.token_ids)
        return part

    patch.setattr(Turns, "run", run_without_end)
    patch.setattr(Turns, "_continue", continue_the_end)


def training_draws_from_the_nucleus(patch: pytest.MonkeyPatch) -> None:
    defaults = SamplingParams.__init__.__defaults__
    assert defaults is not None
    patch.setattr(SamplingParams.__init__, "__defaults__", (defaults[0], 0.95, *defaults[2:]))


def _named_by(patch: pytest.MonkeyPatch, column: str) -> None:
    prompt = Row.prompt

    def prompt_of_column(self: Row, step: int) -> Prompt:
        return replace(prompt(self, step), uid=str(self.values.get(column, 0)))

    patch.setattr(Row, "prompt", prompt_of_column)


def one_group_for_all(patch: pytest.MonkeyPatch) -> None:
    _named_by(patch, "index")


def groups_named_by_question(patch: pytest.MonkeyPatch) -> None:
    _named_by(patch, "question")


def golds_are_taken_as_they_stand(patch: pytest.MonkeyPatch) -> None:
    everywhere(patch, reward.golden_answers, lambda row: tuple(row["golden_answers"]))


def last_action_counts(patch: pytest.MonkeyPatch) -> None:
    def parse_last(text: str, stop: StopReason, **how: Any) -> Action:
        found = re.findall(r"<(search|answer)>([^<]*\S[^<]*)</\1>", text)
        action = parse_action(text, stop, **how)
        return replace(action, kind=ActionKind(found[-1][0]), text=" ".join(found[-1][1].split())) if found else action

    everywhere(patch, parse_action, parse_last)


def unclosed_tag_counts(patch: pytest.MonkeyPatch) -> None:
    def parse_open(text: str, stop: StopReason, **how: Any) -> Action:
        opened = re.search(r"<(search|answer)>([^<]*)$", text)
        if opened:
            return Action(ActionKind(opened[1]), opened[2].strip())
        return parse_action(text, stop, **how)

    everywhere(patch, parse_action, parse_open)


def blank_query_is_searched(patch: pytest.MonkeyPatch) -> None:
    def parse_blank(text: str, stop: StopReason, **how: Any) -> Action:
        action = parse_action(text, stop, **how)
        blank = action.invalid is InvalidKind.BLANK_QUERY
        return replace(action, kind=ActionKind.SEARCH, invalid=None) if blank else action

    everywhere(patch, parse_action, parse_blank)


def forged_information_is_an_observation(patch: pytest.MonkeyPatch) -> None:
    generate = Turns._generate

    async def generate_masked(self: Turns) -> Action:
        action = await generate(self)
        if action.forged_information:
            self.segments[-1] = Segment(SegmentKind.OBSERVATION, self.segments[-1].token_ids)
        return action

    patch.setattr(Turns, "_generate", generate_masked)


def forged_information_hides_what_it_holds(patch: pytest.MonkeyPatch) -> None:
    def parse_outside(text: str, stop: StopReason, **how: Any) -> Action:
        return parse_action(re.sub(r"<information>.*?</information>", "", text, flags=re.DOTALL), stop, **how)

    everywhere(patch, parse_action, parse_outside)


def documents_become_special_ids(patch: pytest.MonkeyPatch) -> None:
    def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    everywhere(patch, encode_plain, encode)


MUTATIONS = (
    Mutation(
        "another_rows_question",
        "the k-th search of a batch was told the question and answers of the batch's k-th row, searching or not",
        another_rows_question,
        (LOOP + "test_rows_that_skip_searching_do_not_shift_the_others",),
    ),
    Mutation(
        "answer_read_from_the_prompt",
        "the reward parsed prompt and response, so the instruction's own example answer was scored",
        answer_read_from_the_prompt,
        (LOOP + "test_a_silent_policy_scores_zero",),
    ),
    Mutation(
        "answer_read_from_documents",
        "an answer inside a document counted as the policy's",
        answer_read_from_documents,
        (LOOP + "test_an_answer_that_only_a_document_holds_scores_zero",),
    ),
    Mutation(
        "no_answer_is_an_error",
        "a trajectory without an answer raised an error in the reward",
        no_answer_is_an_error,
        (REWARD + "::test_no_answer_scores_zero_and_raises_nothing",),
    ),
    Mutation(
        "exact_match_is_substring_match",
        "exact match was substring match without word borders",
        exact_match_is_substring_match,
        (REWARD,),
    ),
    Mutation(
        "f1_of_a_record_holds_em",
        "the F1 kept beside a trajectory was its exact match",
        f1_of_a_record_holds_em,
        (LOOP + "test_a_users_reward_decides_and_sees_the_policys_text_only",),
    ),
    Mutation(
        "f1_of_a_dump_holds_em",
        "the F1 in a dump was the exact match",
        f1_of_a_dump_holds_em,
        ("tests/zerosearch/test_dump.py",),
    ),
    Mutation(
        "response_tokenised_again",
        "responses were decoded, cut and tokenised again, so tokens were trained that nobody sampled",
        response_tokenised_again,
        (LOOP + "test_trained_ids_are_the_sampled_ids_over_three_turns",),
    ),
    Mutation(
        "context_and_training_cut_at_different_ends",
        "a full context kept its last tokens while training kept the first",
        context_and_training_cut_at_different_ends,
        (LOOP + "test_the_policy_reads_all_that_is_trained_until_the_budget_is_full",),
    ),
    Mutation(
        "training_draws_from_the_nucleus",
        "training sampled with top_p 0.95 and trained on the probabilities of the whole distribution",
        training_draws_from_the_nucleus,
        (STEP + "test_a_step_draws_n_samples_of_each_prompt_from_the_whole_distribution",),
    ),
    Mutation(
        "one_group_for_all",
        "the group was a column that most data sets lack, so all rows were one group",
        one_group_for_all,
        (DATASET + "test_uid_is_a_function_of_file_row_and_step",),
    ),
    Mutation(
        "groups_named_by_question",
        "a question that occurs twice was one group",
        groups_named_by_question,
        (DATASET + "test_uid_is_a_function_of_file_row_and_step",),
    ),
    Mutation(
        "golds_are_taken_as_they_stand",
        "gold answers that are no list of texts failed in the reward or never matched",
        golds_are_taken_as_they_stand,
        (REWARD + "::test_golden_answers",),
    ),
    Mutation(
        "last_action_counts",
        "the last action of a generation counted, also behind a search",
        last_action_counts,
        (ACTIONS,),
    ),
    Mutation("unclosed_tag_counts", "a tag never closed counted as an action", unclosed_tag_counts, (ACTIONS,)),
    Mutation("blank_query_is_searched", "a search without a query was run", blank_query_is_searched, (ACTIONS,)),
    Mutation(
        "forged_information_is_an_observation",
        "<information> written by the policy was taken for an observation and not trained",
        forged_information_is_an_observation,
        (LOOP + "test_forged_information_stays_policy_text_and_is_counted",),
    ),
    Mutation(
        "forged_information_hides_what_it_holds",
        "<information> written by the policy was cut out before parsing",
        forged_information_hides_what_it_holds,
        (ACTIONS,),
    ),
    Mutation(
        "documents_become_special_ids",
        "the text of a special token in a document became that token",
        documents_become_special_ids,
        (PROMPTS + "test_special_token_text_in_a_document_gives_no_special_ids",),
    ),
)
