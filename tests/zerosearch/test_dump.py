from __future__ import annotations

from dataclasses import asdict, replace

from transformers import PreTrainedTokenizerFast

from verl.agent_loop.trajectory import Segment, SegmentKind, Trajectory
from verl.trainer import run_dir
from zerosearch.records import Episode
from zerosearch.reward import score_answer


def test_every_score_is_dumped_under_its_own_name(bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    episode = Episode("Where is X?", ("Paris",), None, 0.0, answer="in Paris")
    scores = score_answer(episode.answer, episode.golden_answers)
    ids = tuple(bpe_tokenizer("<answer>in Paris</answer>")["input_ids"])
    trajectory = Trajectory(
        uid="a",
        sample=0,
        step=1,
        mode="train",
        prompt_ids=(5, 6),
        segments=[Segment(SegmentKind.POLICY, ids, (-0.5,) * len(ids), ((0, len(ids)),))],
        reward=scores.f1,
        reward_extra=asdict(scores),
        environment=replace(episode, scores=scores),
    )
    told = run_dir.describe(trajectory, bpe_tokenizer)
    expected = {"f1": 2 / 3, "em": 0.0, "cover_em": 1.0}
    assert told["scores"] == told["environment"]["scores"] == expected
    assert told["reward"] == expected["f1"]
    assert (told["environment"]["answer"], told["segments"][0]["token_ids"]) == ("in Paris", list(ids))
