"""TensorRT-LLM 0.10: releases from 0.10.0.dev2024050700 up to, not including, 0.11.0.dev0."""

from porting_kit.releases.facts import BuildFacts, CompiledKernels, KernelLimits, ReleaseFacts, RunFacts, words

FACTS = ReleaseFacts(
    name="0.10",
    since="0.10.0.dev2024050700",
    before="0.11.0.dev0",
    kernel=KernelLimits(
        dispatcher_head_sizes=(128, 256),
        tokens_per_block=(64, 128),
        compiled=(CompiledKernels(128, (None, 64, 128), (80, 86, 89, 90), (89, 90)),),
        group_power_of_two=True,
        multi_block_mode="ignored",
        kv_scale_applied=False,
        fp8_kv_uses_jit=False,
        no_kernel_message="No available XQA kernels are found for speculative decoding mode.",
        init_message="Speculative decoding mode doesn't support the data type or cross attention.",
        source="gptAttentionCommon.cpp and cubin/xqa_kernel_cubin.h, 0.10.0.dev2024050700 and v0.10.0",
    ),
    build=BuildFacts(
        medusa_switch="speculative_decoding_mode",
        draft_limit_key="max_draft_len",
        plugin_types=("float16", "float32", "bfloat16", "disable"),
        speculative_modes=("draft_tokens_external", "medusa"),
        flags=words(
            "attention_qk_half_accumulation auto_parallel bert_attention_plugin build_config builder_opt "
            "checkpoint_dir cluster_key context_fmha context_fmha_fp32_acc dry_run enable_debug_output enable_xqa "
            "gather_all_token_logits gather_context_logits gather_generation_logits gemm_plugin "
            "gpt_attention_plugin gpus_per_node input_timing_cache log_level logits_dtype lookup_plugin "
            "lora_ckpt_source lora_dir lora_plugin lora_target_modules mamba_conv1d_plugin max_batch_size "
            "max_beam_width max_draft_len max_encoder_input_len max_input_len max_lora_rank max_multimodal_len "
            "max_num_tokens max_output_len max_prompt_embedding_table_size model_cls_file model_cls_name "
            "model_config moe_plugin multi_block_mode multiple_profiles nccl_plugin opt_num_tokens output_dir "
            "output_timing_cache paged_kv_cache paged_state pp_size profiling_verbosity remove_input_padding "
            "speculative_decoding_mode streamingllm strongly_typed tokens_per_block tp_size "
            "use_context_fmha_for_generation use_custom_all_reduce use_fp8_context_fmha use_fused_mlp "
            "use_paged_context_fmha visualize_network weight_only_precision weight_sparsity workers"
        ),
        source="commands/build.py and plugin/plugin.py, 0.10.0.dev2024050700",
    ),
    run=RunFacts(
        needs_py_session=True,
        temperature="1.0",
        flags=words(
            "debug_mode early_stopping engine_dir frequency_penalty input_file input_text length_penalty "
            "log_level lora_ckpt_source lora_dir lora_task_uids max_attention_window_size max_input_length "
            "max_output_len medusa_choices no_add_special_tokens no_prompt_template num_beams num_prepend_vtokens "
            "output_csv output_cum_log_probs_npy output_log_probs_npy output_logits_npy output_npy "
            "presence_penalty prompt_table_path prompt_tasks repetition_penalty run_profiling sink_token_length "
            "streaming streaming_interval temperature tokenizer_dir tokenizer_type top_k top_p use_py_session "
            "vocab_file"
        ),
        source="examples/run.py and examples/utils.py, 0.10.0.dev2024050700",
    ),
    position_kinds=(
        "learned_absolute",
        "rope_gptj",
        "rope_gpt_neox",
        "long_rope",
        "alibi",
        "alibi_with_scale",
        "relative",
        "chatglm",
    ),
    rope_scaling_kinds=("none", "linear", "dynamic"),
)
