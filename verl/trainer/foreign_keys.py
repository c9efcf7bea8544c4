"""The keys of the original ZeroSearch, Search-R1 and verl that have another name here, one meaning, or none."""

from __future__ import annotations

from dataclasses import dataclass

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"

ALIASES: dict[str, str] = {
    f"{_ROLLOUT}.n_agent": f"{_ROLLOUT}.n",
    f"{_ROLLOUT}.response_length": "data.max_response_length",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{_ACTOR}.policy_loss.loss_mode": f"{_ACTOR}.policy_loss",
    f"{_ACTOR}.optim.clip_grad": f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.optim.lr_scheduler_type": f"{_ACTOR}.optim.warmup_style",
    f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype": f"{_ACTOR}.fsdp_config.param_dtype",
    f"{_ACTOR}.fsdp_config.mixed_precision.reduce_dtype": f"{_ACTOR}.fsdp_config.reduce_dtype",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.lr_scheduler_type": "critic.optim.warmup_style",
    "algorithm.rollout_is_threshold": f"{_ACTOR}.rollout_is_threshold",
    "algorithm.rollout_correction.rollout_is_threshold": f"{_ACTOR}.rollout_is_threshold",
    "data.max_start_length": "data.max_prompt_length",
    "data.max_obs_length": f"{_ROLLOUT}.max_observation_length",
    "data.shuffle_train_dataloader": "data.shuffle",
    "data.train_data_num": "data.train_max_samples",
    "data.val_data_num": "data.val_max_samples",
    "retriever.llm_ip": "retriever.ip",
    "retriever.simulate_llm": "retriever.simulation_llm",
    "max_turns": "retriever.max_turns",
    "trainer.max_turns": "retriever.max_turns",
    "trainer.reward_function": "retriever.reward_metric",
    "trainer.total_steps": "trainer.total_training_steps",
}
"""Another name for one of our keys."""

ALIASED_SECTIONS: dict[str, str] = {"critic.model.fsdp_config": "critic.fsdp_config"}
"""A section that lies elsewhere here."""

VALUES: dict[str, dict[str, str]] = {
    f"{_ACTOR}.strategy": {"fsdp": "fsdp2"},
    f"{_ACTOR}.optim.min_lr_ratio": {"null": "0.0"},
    "critic.optim.min_lr_ratio": {"null": "0.0"},
    f"{_ACTOR}.fsdp_config.param_dtype": {"bf16": "bfloat16", "fp32": "float32"},
    f"{_ACTOR}.fsdp_config.reduce_dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "critic.fsdp_config.param_dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "critic.fsdp_config.reduce_dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "data.train_max_samples": {"null": "-1"},
    "data.val_max_samples": {"null": "-1"},
    "trainer.save_freq": {"-1": "0"},
    "trainer.test_freq": {"-1": "0"},
}
"""Another word for one of a key's values."""


@dataclass(frozen=True)
class Fact:
    """What is always so here: the ``values`` of a key that say it, and why it is not otherwise."""

    values: tuple[str, ...]
    reason: str


_SAMPLING = "training on truncated sampling would not follow the policy's gradient"
_PACKED = "rows are always packed, by tokens: see ppo_max_token_len_per_gpu"
_SHARDED = "parameters are sharded over all ranks and stay on their device"
_STREAM = "trajectories run on their own, each turn by turn"

STATED: dict[str, Fact] = {
    f"{_ROLLOUT}.top_k": Fact(("-1", "0"), _SAMPLING),
    f"{_ROLLOUT}.top_p": Fact(("1", "1.0"), f"{_SAMPLING}; for validation set rollout.val_kwargs.top_p"),
    f"{_ROLLOUT}.min_p": Fact(("0", "0.0"), _SAMPLING),
    f"{_ROLLOUT}.repetition_penalty": Fact(("1", "1.0"), _SAMPLING),
    f"{_ROLLOUT}.ignore_eos": Fact(("false",), "an end of sequence ends a generation"),
    f"{_ROLLOUT}.calculate_log_probs": Fact(("true",), "the sampler's log-probabilities are always kept"),
    f"{_ROLLOUT}.mode": Fact(("async",), _STREAM),
    f"{_ROLLOUT}.tensor_model_parallel_size": Fact(("1",), "the torch engine holds the whole model in every replica"),
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz": Fact(("true",), _PACKED),
    f"{_REF}.log_prob_use_dynamic_bsz": Fact(("true",), _PACKED),
    f"{_REF}.fsdp_config.param_offload": Fact(("false",), _SHARDED),
    "actor_rollout_ref.hybrid_engine": Fact(("true",), "training and rollout share their processes' places"),
    "actor_rollout_ref.model.use_remove_padding": Fact(("true",), _PACKED),
    f"{_ACTOR}.use_dynamic_bsz": Fact(("true",), _PACKED),
    f"{_ACTOR}.state_masking": Fact(("true",), "observation tokens are never trained"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": Fact(("1",), "a row is not split over ranks"),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": Fact(("0", "0.", "0.0"), "give steps: optim.lr_warmup_steps"),
    f"{_ACTOR}.optim.total_training_steps": Fact(("-1",), "it is trainer.total_training_steps times updates per step"),
    f"{_ACTOR}.fsdp_config.param_offload": Fact(("false",), _SHARDED),
    f"{_ACTOR}.fsdp_config.grad_offload": Fact(("false",), _SHARDED),
    f"{_ACTOR}.fsdp_config.optimizer_offload": Fact(("false",), _SHARDED),
    f"{_ACTOR}.fsdp_config.fsdp_size": Fact(("-1",), _SHARDED),
    "critic.strategy": Fact(("fsdp", "fsdp2"), "the critic is trained as the actor is"),
    "critic.model.use_remove_padding": Fact(("true",), _PACKED),
    "critic.use_dynamic_bsz": Fact(("true",), _PACKED),
    "critic.ulysses_sequence_parallel_size": Fact(("1",), "a row is not split over ranks"),
    "critic.optim.lr_warmup_steps_ratio": Fact(("0", "0.", "0.0"), "give steps: critic.optim.lr_warmup_steps"),
    "critic.optim.total_training_steps": Fact(("-1",), "it follows trainer.total_training_steps"),
    "critic.fsdp_config.param_offload": Fact(("false",), _SHARDED),
    "critic.fsdp_config.grad_offload": Fact(("false",), _SHARDED),
    "critic.fsdp_config.optimizer_offload": Fact(("false",), _SHARDED),
    "critic.fsdp_config.fsdp_size": Fact(("-1",), _SHARDED),
    "reward_model.enable": Fact(("false",), "rewards come from retriever.reward_metric or custom_reward_function"),
    "algorithm.kl_penalty": Fact(("kl", "k1"), "KL in the reward is k1, the log-probabilities' difference"),
    "trainer.balance_batch": Fact(("true",), "trajectories are always dealt to the ranks by length"),
    "trainer.do_search": Fact(("true",), "without searches set retriever.max_turns=0"),
    "do_search": Fact(("true",), "without searches set retriever.max_turns=0"),
    "reranker.do_rerank": Fact(("false",), "documents are taken in the engine's order"),
}
"""Keys that only say what is always so here: accepted with these values and left away, refused with others."""

_MICRO = "micro-batches are packed by tokens: set ppo_max_token_len_per_gpu, which never changes the gradient"
_VLLM = "it is a setting of another rollout engine; rows are bounded by rollout.max_num_seqs"
_WRAPPED = "every decoder layer is wrapped by itself"
_CODE = "models are loaded without outside code; trust_remote_code is the one switch"

REFUSED: dict[str, str] = {
    "data.tokenizer": "the tokenizer is the model's own",
    "data.val_batch_size": "validation is a stream: every row is scored, whatever the size",
    "data.return_raw_input_ids": "rewards read ids and text of the trajectory itself",
    "data.return_raw_chat": "rewards read ids and text of the trajectory itself",
    "data.truncation": "prompts are never cut: data.filter_overlong_prompts leaves them out or refuses them",
    "data.reward_fn_key": "rewards are told the row's data_source",
    "data.custom_cls": "data files are Parquet or JSON lines",
    "data.dataloader_num_workers": "all rows are read and tokenised once, before the run",
    f"{_ROLLOUT}.do_sample": "training always samples; for validation set rollout.val_kwargs.do_sample",
    f"{_ROLLOUT}.max_num_batched_tokens": _VLLM,
    f"{_ROLLOUT}.max_model_len": "a trajectory is bounded by data.max_prompt_length + data.max_response_length",
    f"{_ROLLOUT}.gpu_memory_utilization": _VLLM,
    f"{_ROLLOUT}.enforce_eager": _VLLM,
    f"{_ROLLOUT}.free_cache_engine": _VLLM,
    f"{_ROLLOUT}.load_format": "weights come from the actor, by name, after every step",
    f"{_ROLLOUT}.multi_turn": "turns are the environment's: retriever.max_turns",
    f"{_ROLLOUT}.agent": "the environment is named by environment.path",
    f"{_ROLLOUT}.log_prob_micro_batch_size": _MICRO,
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": _MICRO,
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": "old log-probabilities take actor.ppo_max_token_len_per_gpu",
    f"{_REF}.log_prob_micro_batch_size": f"{_MICRO.split(':')[0]}: set ref.log_prob_max_token_len_per_gpu",
    f"{_REF}.log_prob_micro_batch_size_per_gpu": f"{_MICRO.split(':')[0]}: set ref.log_prob_max_token_len_per_gpu",
    f"{_REF}.ulysses_sequence_parallel_size": "a row is not split over ranks",
    f"{_REF}.fsdp_config": "the reference is sharded as the actor is",
    f"{_REF}.model": "the reference is the policy as the run found it",
    "actor_rollout_ref.model.external_lib": _CODE,
    "actor_rollout_ref.model.override_config": "a checkpoint is trained as its config.json says",
    f"{_ACTOR}.ppo_micro_batch_size": _MICRO,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": _MICRO,
    f"{_ACTOR}.use_torch_compile": "models run as they are written",
    f"{_ACTOR}.checkpoint": "checkpoints are Hugging Face directories: trainer.save_last, trainer.save_best",
    f"{_ACTOR}.loss_mode": "the policy loss is named by actor.policy_loss",
    f"{_ACTOR}.fsdp_config.wrap_policy": _WRAPPED,
    f"{_ACTOR}.fsdp_config.model_dtype": "masters are always float32; fsdp_config.param_dtype is the compute type",
    f"{_ACTOR}.fsdp_config.forward_prefetch": "layers are gathered as they are needed",
    "critic.model.tokenizer_path": "the critic reads the policy's ids",
    "critic.model.external_lib": _CODE,
    "critic.model.override_config": "a checkpoint is trained as its config.json says",
    "critic.fsdp_config.wrap_policy": _WRAPPED,
    "critic.model.fsdp_config.wrap_policy": _WRAPPED,
    "critic.ppo_micro_batch_size": _MICRO,
    "critic.ppo_micro_batch_size_per_gpu": _MICRO,
    "critic.forward_micro_batch_size": _MICRO,
    "critic.forward_micro_batch_size_per_gpu": _MICRO,
    "critic.forward_max_token_len_per_gpu": "values are computed in packs of critic.ppo_max_token_len_per_gpu",
    "reward_model": "rewards come from retriever.reward_metric or custom_reward_function",
    "reranker": "documents are taken in the engine's order",
    "algorithm.no_think_rl": "it did nothing",
    "algorithm.state_masking": "observation tokens are never trained",
    "trainer.default_hdfs_dir": "runs are written below trainer.default_local_dir",
    "trainer.total_epochs": "a run's length is trainer.total_training_steps; an epoch has rows/train_batch_size",
    "trainer.device": "trainer.n_gpus_per_node=0 is the CPU",
    "trainer.max_actor_ckpt_to_keep": "the last and the best weights are kept: trainer.save_last, trainer.save_best",
    "trainer.max_critic_ckpt_to_keep": "the last and the best weights are kept: trainer.save_last, trainer.save_best",
    "trainer.del_local_ckpt_after_load": "a run never removes what another one wrote",
    "trainer.log_val_generations": "every validation trajectory is written below trajectories/",
    "trainer.validation_data_dir": "validation trajectories are written below the run's trajectories/",
    "ray_init": "Ray is joined by RAY_ADDRESS, or started here; trainer.object_store_megabytes is its shared memory",
}
"""Keys (and whole sections) that would do nothing here, with the reason."""
