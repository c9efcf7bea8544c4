"""The worker through its worker group: two ranks, real Gloo, batches as the trainer makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from verl import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.actor_loss import ActorLoss
from verl.trainer.ppo.critic_loss import CriticLoss
from verl.workers.config import ActorConfig, CriticConfig, ModelConfig, OptimConfig, RefConfig, RolloutConfig
from verl.workers.engine.rows import Row
from verl.workers.rollout.engine import InfrastructureError
from verl.workers.training_worker import TrainingWorker, TrainingWorkerConfig, critic_model

ACTOR = ActorConfig(optim=OptimConfig(lr=1e-2, lr_warmup_steps=2), kl_loss_coef=0.1, ppo_max_token_len_per_gpu=64)
TEMPERATURE = 0.7


def worker_config(path: str, actor: ActorConfig = ACTOR, **rollout: Any) -> TrainingWorkerConfig:
    return TrainingWorkerConfig(
        model_path=path,
        model=ModelConfig(path="not/the/resolved/path"),
        actor=actor,
        ref=RefConfig(log_prob_max_token_len_per_gpu=50),
        rollout=RolloutConfig(temperature=TEMPERATURE, **rollout),
        loss=ActorLoss.of(actor),
        needs_reference=actor.use_kl_loss,
        total_training_steps=5,
        num_threads=1,
        device="cpu",
        run_dir="",
    )


MakeGroup = Callable[..., RayWorkerGroup]


@contextmanager
def _groups(name: str) -> Iterator[MakeGroup]:
    groups: list[RayWorkerGroup] = []

    def make(config: TrainingWorkerConfig, ranks: int = 2) -> RayWorkerGroup:
        pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1, name_prefix=f"{name}_{len(groups)}")
        groups.append(RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(TrainingWorker), config)))
        groups[-1].init_model()
        return groups[-1]

    yield make
    for group in groups:
        group.shutdown()


@pytest.fixture(scope="module")
def make_shared_group(ray_session: None) -> Iterator[MakeGroup]:
    with _groups("shared") as make:
        yield make


@pytest.fixture
def make_group(ray_session: None) -> Iterator[MakeGroup]:
    """Groups of one test, which gives their places back."""
    with _groups("own") as make:
        yield make


@pytest.fixture(scope="module")
def group(make_shared_group: MakeGroup, checkpoint: Any) -> RayWorkerGroup:
    """Two ranks with a reference; tied embeddings."""
    return make_shared_group(worker_config(checkpoint("qwen2")))


@pytest.fixture(scope="module")
def bare_group(make_shared_group: MakeGroup, checkpoint: Any) -> RayWorkerGroup:
    """Two ranks without a reference; embeddings not tied; the rollout in bfloat16."""
    return make_shared_group(worker_config(checkpoint("llama"), replace(ACTOR, use_kl_loss=False), dtype="bfloat16"))


def padded_batch(rows: Sequence[Row], keys: Sequence[str] = ()) -> DataProto:
    """Prompts padded on the left, responses on the right, with 0, which is a real token too."""
    pad = torch.nn.utils.rnn.pad_sequence
    prompts = [row.input_ids[: row.prompt_length] for row in rows]
    responses = [row.input_ids[row.prompt_length :] for row in rows]
    tensors = {
        "prompts": pad(prompts, batch_first=True, padding_side="left"),
        "responses": pad(responses, batch_first=True),
        "attention_mask": torch.cat(
            [
                pad([torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left"),
                pad([torch.ones_like(r) for r in responses], batch_first=True),
            ],
            dim=1,
        ),
        "response_mask": pad([row.response_mask.long() for row in rows], batch_first=True),
        **{key: pad([row.fields[key] for row in rows], batch_first=True) for key in keys},
    }
    uids = np.array([f"uid-{i}" for i in range(len(rows))], dtype=object)
    return DataProto.from_dict(tensors, {"uid": uids}, meta_info={"global_steps": 1})


@ray.remote(num_cpus=0)
class Receiver:
    """Records what it is sent, as an engine would apply it."""

    def expect(self, fails_in: str = "") -> None:
        """Forgets what was; the method of that name will fail."""
        self.fails_in = fails_in
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}

    def _record(self, call: str) -> None:
        self.calls.append(call)
        if call.startswith(self.fails_in or "never"):
            raise RuntimeError("out of order")

    async def begin_weights(self, version: int) -> None:
        self._record(f"begin {version}")

    async def load_weights(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        self._record("load")
        assert not {name for name, _ in bucket} & self.weights.keys()
        self.weights.update(bucket)

    async def end_weights(self, version: int) -> None:
        self._record(f"end {version}")

    def received(self) -> tuple[list[str], dict[str, torch.Tensor]]:
        return self.calls, self.weights


Send = Callable[..., list[tuple[list[str], dict[str, torch.Tensor]]]]


@pytest.fixture(scope="module")
def send(ray_session: None) -> Iterator[Send]:
    """Sends a group's weights to two receivers, the second of which may fail; returns their calls and weights."""
    receivers = [Receiver.remote() for _ in range(2)]

    def call(group: RayWorkerGroup, version: int, fails_in: str = "") -> Any:
        ray.get([receivers[0].expect.remote(), receivers[1].expect.remote(fails_in)])
        group.send_weights(receivers, version)
        return ray.get([receiver.received.remote() for receiver in receivers])

    yield call
    for receiver in receivers:
        ray.kill(receiver)


def without_old_log_probs(rows: Sequence[Row]) -> list[Row]:
    return [replace(row, fields={k: v for k, v in row.fields.items() if k != "old_log_probs"}) for row in rows]


def test_a_training_step_on_two_ranks(
    group: RayWorkerGroup,
    send: Send,
    checkpoint: Any,
    make_rows: Any,
    plain_scores: Any,
    plain_gradient: Any,
    tmp_path: Path,
) -> None:
    """Scores, update, weight stream and export, each against a plain single-process computation."""
    path, rows = checkpoint("qwen2"), make_rows(7)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    keys = ["advantages", "rollout_log_probs"]
    batch = padded_batch(rows, keys)

    old = group.compute_log_prob(batch)
    reference = group.compute_ref_log_prob(batch)
    assert torch.equal(old.batch["old_log_probs"], reference.batch["ref_log_prob"])
    for i, row in enumerate(rows):
        for values, expected in zip(("old_log_probs", "entropys"), plain_scores(model, row, TEMPERATURE), strict=True):
            actual = old.batch[values][i]
            wanted = expected.detach() * row.response_mask
            torch.testing.assert_close(actual[: row.response_length], wanted, atol=1e-5, rtol=1e-5)
            assert not actual[row.response_length :].any()

    batch = batch.union(reference)
    for i, row in enumerate(rows):
        row.fields["ref_log_prob"] = reference.batch["ref_log_prob"][i, : row.response_length]
    metrics = group.update_actor(batch).meta_info["metrics"]
    loss, gradients = plain_gradient(path, without_old_log_probs(rows), ACTOR, TEMPERATURE)
    assert all(type(value) is float for value in metrics.values())
    assert metrics["actor/loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["actor/kl_loss"] == 0
    assert metrics["actor/lr"] == 0.5e-2
    assert metrics["actor/tokens"] == sum(row.trained_tokens for row in rows)
    assert metrics["actor/nonfinite_updates"] == 0
    entropy = torch.cat([plain_scores(model, row, TEMPERATURE)[1][row.response_mask] for row in rows]).mean()
    assert metrics["actor/entropy"] == pytest.approx(entropy.item(), rel=1e-5)

    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ACTOR.grad_clip)
    torch.optim.AdamW(model.parameters(), lr=0.5e-2, betas=(0.9, 0.999), weight_decay=0.01).step()
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)

    (_, weights), _ = send(group, 1)
    expected_weights = dict(model.named_parameters())
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected_weights[name].detach(), atol=2e-5, rtol=1e-4)

    group.save_hf(str(tmp_path / "export"), stop_strings=["</answer>"])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    assert all(torch.equal(tensor, weights[name]) for name, tensor in exported.named_parameters())
    assert exported.generation_config.stop_strings == ["</answer>"]

    moved = group.compute_ref_log_prob(batch)
    assert torch.equal(moved.batch["ref_log_prob"], reference.batch["ref_log_prob"])


def test_a_single_row_trains_on_two_ranks_and_further_updates_need_the_old_log_probs(
    bare_group: RayWorkerGroup, make_rows: Any
) -> None:
    (row,) = make_rows(1)
    batch = padded_batch([row], ["advantages", "rollout_log_probs"])
    assert bare_group.update_actor(batch).meta_info["metrics"]["actor/tokens"] == row.trained_tokens
    with pytest.raises(ValueError, match="second update in step 1 needs old_log_probs"):
        bare_group.update_actor(batch)
    batch = batch.union(bare_group.compute_log_prob(batch).select(batch_keys=["old_log_probs"]))
    metrics = [bare_group.update_actor(batch).meta_info["metrics"] for _ in range(2)]
    assert metrics[0]["actor/ppo_kl"] == 0 != metrics[1]["actor/ppo_kl"]
    batch.meta_info.clear()
    with pytest.raises(ValueError, match="global_steps"):
        bare_group.update_actor(batch)
    with pytest.raises(ValueError, match="no reference model"):
        bare_group.compute_ref_log_prob(batch)
    for method in (bare_group.compute_values, bare_group.update_critic):
        with pytest.raises(ValueError, match="no critic"):
            method(batch)


def test_weights_go_to_every_receiver_in_the_rollouts_type(
    bare_group: RayWorkerGroup, send: Send, tmp_path: Path
) -> None:
    received = send(bare_group, 8)
    bare_group.save_hf(str(tmp_path / "export"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.bfloat16)
    for calls, weights in received:
        assert (calls[0], calls[-1], set(calls[1:-1])) == ("begin 8", "end 8", {"load"})
        assert weights.keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())


def test_a_failed_receiver_is_an_infrastructure_error_and_no_rank_hangs(group: RayWorkerGroup, send: Send) -> None:
    for method in ("begin", "load", "end"):
        with pytest.raises(InfrastructureError, match=f"receiver 1 failed in {method}_weights"):
            send(group, 1, fails_in=method)
    assert send(group, 2)


CRITIC = CriticConfig(cliprange_value=1e-3, optim=OptimConfig(lr=2e-2, lr_warmup_steps=2), ppo_max_token_len_per_gpu=64)


def critic_config(path: str, run_dir: Path, critic: CriticConfig = CRITIC) -> TrainingWorkerConfig:
    """A critic and, though no actor's loss asks for it, a reference."""
    base = worker_config(path, replace(ACTOR, use_kl_loss=False))
    return replace(base, needs_reference=True, critic=critic, critic_loss=CriticLoss.of(critic), run_dir=str(run_dir))


def critic_batch(rows: Sequence[Row], values: DataProto, poison: bool = False) -> DataProto:
    """Returns of 0.5, or what is no number, for values that were computed before."""
    target = float("nan") if poison else 0.5
    rows = [replace(row, fields={**row.fields, "returns": torch.full((row.response_length,), target)}) for row in rows]
    return padded_batch(rows, ["returns", "advantages", "rollout_log_probs"]).union(values)


def critic_history(group: RayWorkerGroup, rows: Sequence[Row]) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """Two updates of one step, one of the actor, one of the critic in the next step; metrics and values in between."""
    values = [group.compute_values(padded_batch(rows))]
    batch = critic_batch(rows, values[0].select(batch_keys=["values"]))
    metrics = []
    for step in (1, 1, 2):
        batch.meta_info["global_steps"] = step
        metrics.append(group.update_critic(batch).meta_info["metrics"])
        values.append(group.compute_values(batch))
        if len(metrics) == 2:
            group.update_actor(batch)
            assert torch.equal(group.compute_values(batch).batch["values"], values[-1].batch["values"])
    assert all(value.meta_info["metrics"].keys() == {"perf/values_seconds"} for value in values)
    return metrics, [value.batch["values"] for value in values]


def test_a_critic_on_two_ranks_is_that_of_one_rank(
    make_group: Any, checkpoint: Any, make_rows: Any, tmp_path: Path
) -> None:
    """Seven rows for two ranks; the actor's updates and a skipped one leave the critic alone."""
    path, rows = checkpoint("qwen2"), make_rows(7)
    two = make_group(critic_config(path, tmp_path))
    metrics, values = critic_history(two, rows)
    expected_metrics, expected_values = critic_history(make_group(critic_config(path, tmp_path), ranks=1), rows)
    for actual, expected in zip(metrics, expected_metrics, strict=True):
        assert all(type(value) is float for value in actual.values())
        assert actual.pop("perf/update_critic_seconds") > 0
        del expected["perf/update_critic_seconds"]
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-6)
    for value, expected_value in zip(values, expected_values, strict=True):
        torch.testing.assert_close(value, expected_value, atol=1e-4, rtol=1e-4)

    mask = padded_batch(rows).batch["response_mask"].bool()
    assert not values[0].any()
    assert all(value.dtype == torch.float32 and not value[~mask].any() for value in values)
    assert values[1][mask].all()
    assert metrics[0]["critic/loss"] == pytest.approx(0.5 * 0.5**2)
    assert [m["critic/lr"] for m in metrics] == [1e-2, 1e-2, 2e-2]
    assert {m["critic/tokens"] for m in metrics} == {int(mask.sum())}
    assert {m["critic/nonfinite_updates"] for m in metrics} == {0}
    assert metrics[0]["critic/vf_clipfrac"] == 0 < metrics[1]["critic/vf_clipfrac"], "the values must stay the batch's"

    assert two.compute_ref_log_prob(padded_batch(rows)).batch["ref_log_prob"].any()
    poisoned = critic_batch(rows[:1], DataProto.from_dict({"values": values[0][:1, : rows[0].response_length]}), True)
    assert two.update_critic(poisoned).meta_info["metrics"]["critic/nonfinite_updates"] == 1
    assert [file.parent.name for file in (tmp_path / "nonfinite").rglob("*.safetensors")] == ["critic"]
    after = two.compute_values(padded_batch(rows)).batch["values"]
    assert torch.equal(after, values[-1])


def test_a_critic_without_a_path_takes_the_policys_and_checkpointing_from_either(tmp_path: Path) -> None:
    policy = ModelConfig(path="hub/name", trust_remote_code=True)
    config = replace(critic_config("/disk/policy", tmp_path), model=policy)
    assert critic_model(config) == replace(policy, path="/disk/policy")
    for actors, critics in ((True, False), (False, True), (True, True)):
        both = replace(
            config,
            model=replace(policy, enable_gradient_checkpointing=actors),
            critic=replace(CRITIC, model=ModelConfig(enable_gradient_checkpointing=critics)),
        )
        assert critic_model(both) == ModelConfig("/disk/policy", True, True)
    own = ModelConfig(path="/disk/critic")
    checkpointed = replace(config, model=replace(policy, enable_gradient_checkpointing=True))
    assert critic_model(replace(checkpointed, critic=replace(CRITIC, model=own))) == own
    packaged = replace(CRITIC, model=ModelConfig(path="pkg://verl.workers/engine"))
    assert Path(critic_model(replace(config, critic=packaged)).path).name == "engine"
    assert Path(critic_model(replace(config, critic=packaged)).path).is_dir()


def test_the_actors_schedule_counts_from_its_first_update(make_group: Any, checkpoint: Any, make_rows: Any) -> None:
    """A warm-up of two steps after two steps of the critic alone: half the rate, then all of it."""
    group = make_group(
        replace(worker_config(checkpoint("qwen2"), replace(ACTOR, use_kl_loss=False)), critic_warmup=2), 1
    )
    batch = padded_batch(make_rows(2), ["advantages", "rollout_log_probs"])
    rates = []
    for step in (3, 4, 5):
        batch.meta_info["global_steps"] = step
        rates.append(group.update_actor(batch).meta_info["metrics"]["actor/lr"])
    assert rates == [5e-3, 1e-2, 1e-2]


def test_weights_that_cannot_be_written_leave_no_rank_behind(group: RayWorkerGroup, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        group.save_hf(str(tmp_path / "file" / "weights"))
    group.save_hf(str(tmp_path / "weights"))
    assert (tmp_path / "weights" / "model.safetensors").is_file()
