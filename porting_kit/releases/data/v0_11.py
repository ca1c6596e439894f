"""TensorRT-LLM 0.11: releases from 0.11.0.dev0 up to, not including, 0.12.0.dev0."""

from porting_kit.releases.facts import (
    BuildFacts,
    CompiledKernels,
    KernelLimits,
    PartialFlag,
    ReleaseFacts,
    RunFacts,
    words,
)

FACTS = ReleaseFacts(
    name="0.11",
    since="0.11.0.dev0",
    before="0.12.0.dev0",
    kernel=KernelLimits(
        dispatcher_head_sizes=(128, 256),
        tokens_per_block=(64, 128),
        compiled=(CompiledKernels(128, (None, 64, 128), (80, 86, 89, 90), (89, 90)),),
        group_power_of_two=False,
        multi_block_mode="refused",
        kv_scale_applied=True,
        fp8_kv_uses_jit=False,
        no_kernel_message="No available XQA kernels are found for speculative decoding mode.",
        init_message="Speculative decoding mode doesn't support the data type or cross attention.",
        source=(
            "gptAttentionCommon.cpp, decoderXQAImplPrecompiled.cpp and cubin/xqa_kernel_cubin.h, "
            "0.11.0.dev2024051400 and 0.11.0.dev2024062500"
        ),
    ),
    build=BuildFacts(
        medusa_switch="speculative_decoding_mode",
        draft_limit_key="max_draft_len",
        plugin_types=("auto", "float16", "float32", "bfloat16", "int32", "fp8", "disable"),
        speculative_modes=("draft_tokens_external", "lookahead_decoding", "medusa"),
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
            "speculative_decoding_mode streamingllm strip_plan tokens_per_block tp_size use_custom_all_reduce "
            "use_fp8_context_fmha use_fused_mlp use_paged_context_fmha visualize_network weight_sparsity "
            "weight_streaming workers"
        ),
        partial=(
            PartialFlag("gemm_swiglu_plugin", since="0.11.0.dev2024060400"),
            PartialFlag("max_decoder_seq_len", since="0.11.0.dev2024061800"),
            PartialFlag("max_seq_len", since="0.11.0.dev2024061800"),
            PartialFlag("reduce_fusion", since="0.11.0.dev2024061100"),
            PartialFlag("strongly_typed", before="0.11.0.dev2024060400"),
            PartialFlag("weight_only_precision", before="0.11.0.dev2024062500"),
        ),
        source="commands/build.py and plugin/plugin.py, 0.11.0.dev2024051400 to 0.11.0.dev2024062500",
    ),
    run=RunFacts(
        needs_py_session=False,
        temperature="1.0",
        flags=words(
            "debug_mode early_stopping engine_dir frequency_penalty gpu_weights_percent input_file input_text "
            "length_penalty log_level lora_ckpt_source lora_dir lora_task_uids max_attention_window_size "
            "max_input_length max_output_len medusa_choices no_add_special_tokens no_prompt_template num_beams "
            "num_prepend_vtokens output_csv output_cum_log_probs_npy output_log_probs_npy output_logits_npy "
            "output_npy presence_penalty prompt_table_path prompt_tasks repetition_penalty run_profiling "
            "sink_token_length streaming streaming_interval temperature tokenizer_dir tokenizer_type top_k top_p "
            "use_py_session vocab_file"
        ),
        partial=(
            PartialFlag("bad_words", since="0.11.0.dev2024061100"),
            PartialFlag("beam_search_diversity_rate", since="0.11.0.dev2024061100"),
            PartialFlag("data_type", since="0.11.0.dev2024061100"),
            PartialFlag("enable_chunked_context", since="0.11.0.dev2024052800"),
            PartialFlag("hf_data_type", since="0.11.0.dev2024061100"),
            PartialFlag("hf_device_map_auto", since="0.11.0.dev2024061100"),
            PartialFlag("hf_model_dir", since="0.11.0.dev2024061100"),
            PartialFlag("kv_cache_enable_block_reuse", since="0.11.0.dev2024052800"),
            PartialFlag("kv_cache_free_gpu_memory_fraction", since="0.11.0.dev2024052800"),
            PartialFlag("max_tokens_in_paged_kv_cache", since="0.11.0.dev2024052800"),
            PartialFlag("model_dir", since="0.11.0.dev2024061100"),
            PartialFlag("no_repeat_ngram_size", since="0.11.0.dev2024060400"),
            PartialFlag("random_seed", since="0.11.0.dev2024061100"),
            PartialFlag("stop_words", since="0.11.0.dev2024061100"),
        ),
        source="examples/run.py and examples/utils.py, 0.11.0.dev2024051400 to 0.11.0.dev2024062500",
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
