"""The keys that users of the original ZeroSearch, of Search-R1 and of verl's recipes have in their scripts."""

from __future__ import annotations

_DATA = """
tokenizer=null train_files=a.parquet val_files=b.parquet train_data_num=null val_data_num=null prompt_key=prompt
max_prompt_length=4096 max_response_length=500 max_start_length=2048 max_obs_length=2048 train_batch_size=64
val_batch_size=64 return_raw_input_ids=False return_raw_chat=False shuffle_train_dataloader=True truncation=error
filter_overlong_prompts=True reward_fn_key=data_source
"""
_MODEL = """
path=m external_lib=null override_config.a=1 enable_gradient_checkpointing=true use_remove_padding=True
"""
_ACTOR = """
strategy=fsdp ppo_mini_batch_size=256 ppo_micro_batch_size=64 ppo_micro_batch_size_per_gpu=4 use_dynamic_bsz=True
ppo_max_token_len_per_gpu=16384 grad_clip=1.0 state_masking=True clip_ratio=0.2 entropy_coeff=0.001 use_kl_loss=true
kl_loss_coef=0.001 kl_loss_type=low_var_kl ppo_epochs=1 shuffle=False ulysses_sequence_parallel_size=1
use_torch_compile=True loss_agg_mode=token-mean clip_ratio_low=0.2 clip_ratio_high=0.2 clip_ratio_c=3.0
policy_loss.loss_mode=vanilla optim.lr=1e-6 optim.lr_warmup_steps=1 optim.lr_warmup_steps_ratio=0.95
optim.min_lr_ratio=null optim.warmup_style=constant optim.total_training_steps=-1 optim.weight_decay=0.01
fsdp_config.wrap_policy.min_num_params=0 fsdp_config.param_offload=False fsdp_config.grad_offload=False
fsdp_config.optimizer_offload=False fsdp_config.fsdp_size=-1 fsdp_config.model_dtype=bf16 checkpoint.save_contents=[]
"""
_REF = """
fsdp_config.param_offload=True fsdp_config.wrap_policy.min_num_params=0 fsdp_config.fsdp_size=-1
log_prob_micro_batch_size=128 log_prob_micro_batch_size_per_gpu=8 log_prob_use_dynamic_bsz=True
log_prob_max_token_len_per_gpu=16384 ulysses_sequence_parallel_size=1 model.path=m
"""
_ROLLOUT = """
name=torch temperature=1 top_k=-1 top_p=0.95 prompt_length=4 response_length=4 dtype=bfloat16 mode=async
gpu_memory_utilization=0.6 ignore_eos=False enforce_eager=True free_cache_engine=True load_format=dummy_dtensor
tensor_model_parallel_size=1 max_num_batched_tokens=8192 max_num_seqs=1024 log_prob_micro_batch_size=128
log_prob_micro_batch_size_per_gpu=8 log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=4 do_sample=True n=5
n_agent=5 max_model_len=4096 multi_turn.enable=True agent.num_workers=8 calculate_log_probs=True
val_kwargs.do_sample=True val_kwargs.temperature=1.0 val_kwargs.top_p=1.0 val_kwargs.n=1
"""
_CRITIC = """
strategy=fsdp optim.lr=1e-5 optim.lr_warmup_steps_ratio=0.015 optim.min_lr_ratio=null optim.warmup_style=constant
optim.total_training_steps=-1 model.path=m model.tokenizer_path=m model.override_config.a=1 model.external_lib=null
model.enable_gradient_checkpointing=True model.use_remove_padding=True model.fsdp_config.param_offload=False
model.fsdp_config.grad_offload=False model.fsdp_config.optimizer_offload=False model.fsdp_config.fsdp_size=-1
model.fsdp_config.wrap_policy.min_num_params=0 ppo_mini_batch_size=256 ppo_micro_batch_size=64
ppo_micro_batch_size_per_gpu=4 forward_micro_batch_size=64 forward_micro_batch_size_per_gpu=4 use_dynamic_bsz=True
ppo_max_token_len_per_gpu=32768 forward_max_token_len_per_gpu=32768 ulysses_sequence_parallel_size=1 ppo_epochs=1
shuffle=False grad_clip=1.0 cliprange_value=0.5 loss_agg_mode=token-mean
"""
_REWARD_MODEL = """
enable=False strategy=fsdp model.path=m model.input_tokenizer=m model.external_lib=null model.use_remove_padding=False
model.fsdp_config.min_num_params=0 model.fsdp_config.param_offload=False micro_batch_size=64 max_length=null
ulysses_sequence_parallel_size=1 use_dynamic_bsz=False forward_max_token_len_per_gpu=4
"""
_RETRIEVER = """
topk=5 llm_ip=localhost search_mode=simulate_sft search_engine=google start_threshold=0 end_threshold=0.5
simulate_llm=m
"""
_ALGORITHM = """
gamma=1.0 lam=1.0 adv_estimator=gae no_think_rl=False kl_penalty=kl kl_ctrl.type=fixed kl_ctrl.kl_coef=0.001
state_masking.start_state_marker=a state_masking.end_state_marker=b use_kl_in_reward=True norm_adv_by_std_in_grpo=True
"""
_TRAINER = """
total_epochs=10 total_training_steps=203 project_name=p experiment_name=e logger=[wandb] nnodes=1 n_gpus_per_node=4
save_freq=-1 test_freq=-1 critic_warmup=0 default_hdfs_dir=null default_local_dir=d val_only=false
val_before_train=False max_turns=5 reward_function=f1 do_search=True balance_batch=True device=cuda
max_actor_ckpt_to_keep=1
"""
_SECTIONS = {
    "data": _DATA,
    "actor_rollout_ref.model": _MODEL,
    "actor_rollout_ref.actor": _ACTOR,
    "actor_rollout_ref.ref": _REF,
    "actor_rollout_ref.rollout": _ROLLOUT,
    "critic": _CRITIC,
    "reward_model": _REWARD_MODEL,
    "retriever": _RETRIEVER,
    "reranker": "do_rerank=False url=u topk=3",
    "algorithm": _ALGORITHM,
    "trainer": _TRAINER,
}
_TOP = ["actor_rollout_ref.hybrid_engine=True", "max_turns=10", "do_search=true", "custom_reward_function.path=null"]

ORIGINAL_OVERRIDES = [f"{section}.{pair}" for section, pairs in _SECTIONS.items() for pair in pairs.split()] + _TOP
