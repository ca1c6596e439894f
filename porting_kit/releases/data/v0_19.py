"""TensorRT-LLM 0.19 to 1.1: releases from 0.19.0.dev0 up to, not including, 1.2.0.dev0."""

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
    name="0.19 to 1.1",
    since="0.19.0.dev0",
    before="1.2.0.dev0",
    kernel=KernelLimits(
        dispatcher_head_sizes=(64, 128, 256),
        tokens_per_block=(32, 64, 128),
        compiled=(
            CompiledKernels(128, (None, 32, 64, 128), (80, 86, 89, 90), (89, 90)),
            CompiledKernels(64, (32, 64), (80, 86, 89, 90), (89, 90)),
        ),
        group_power_of_two=False,
        multi_block_mode="switched off",
        kv_scale_applied=True,
        fp8_kv_uses_jit=True,
        no_kernel_message="No available XQA kernels are found for speculative decoding mode.",
        init_message="Speculative decoding mode doesn't support the data type or cross attention.",
        source=(
            "names of the compiled kernels as for 0.17; decoderXQARunner.cpp and decoderXQAImplJIT (run-time "
            "kernel for fp8 caches, April 2025)"
        ),
        inferred="the release that brought the run-time kernel is bracketed by the date of its pull request",
    ),
    build=BuildFacts(
        medusa_switch="speculative_decoding_mode",
        draft_limit_key="max_draft_len",
        plugin_types=("auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", "disable"),
        speculative_modes=("draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens", "eagle"),
        flags=words(
            "auto_parallel bert_attention_plugin bert_context_fmha_fp32_acc build_config checkpoint_dir cluster_key "
            "context_fmha dora_plugin dry_run enable_debug_output fast_build fp8_rowwise_gemm_plugin fuse_fp4_quant "
            "gather_all_token_logits gather_context_logits gather_generation_logits gemm_allreduce_plugin "
            "gemm_plugin gemm_swiglu_plugin gpt_attention_plugin gpus_per_node input_timing_cache kv_cache_type "
            "log_level logits_dtype lora_ckpt_source lora_dir lora_plugin lora_target_modules "
            "low_latency_gemm_plugin low_latency_gemm_swiglu_plugin mamba_conv1d_plugin max_batch_size "
            "max_beam_width max_decoder_seq_len max_draft_len max_encoder_input_len max_input_len max_lora_rank "
            "max_multimodal_len max_num_tokens max_prompt_embedding_table_size max_seq_len model_cls_file "
            "model_cls_name model_config moe_plugin monitor_memory multiple_profiles nccl_plugin norm_quant_fusion "
            "opt_num_tokens output_dir output_timing_cache paged_kv_cache paged_state pp_reduce_scatter "
            "profiling_verbosity reduce_fusion remove_input_padding speculative_decoding_mode streamingllm "
            "strip_plan tokens_per_block use_fp8_context_fmha use_fused_mlp use_paged_context_fmha user_buffer "
            "visualize_network weight_sparsity weight_streaming workers"
        ),
        source=(
            "what trtllm-build prints as its usage, in the documentation of 0.19.0 and 1.0.0; commands/build.py and "
            "plugin/plugin.py of 0.20.0 and 1.1.0rc6; all four agree"
        ),
    ),
    run=RunFacts(
        needs_py_session=False,
        temperature="1.0",
        flags=words(
            "bad_words beam_search_diversity_rate cross_kv_cache_fraction cuda_graph_mode data_type debug_mode "
            "draft_engine_dir draft_target_model_config eagle_choices eagle_posterior_threshold early_stopping "
            "enable_chunked_context enable_context_fmha_fp32_acc end_id engine_dir frequency_penalty "
            "gpu_weights_percent hf_data_type hf_device_map_auto hf_model_dir input_file input_text "
            "input_token_extra_ids input_token_extra_ids_file kv_cache_enable_block_reuse "
            "kv_cache_free_gpu_memory_fraction length_penalty log_level lookahead_config lora_ckpt_source lora_dir "
            "lora_task_uids max_attention_window_size max_input_length max_output_len max_tokens_in_paged_kv_cache "
            "medusa_choices model_dir multi_block_mode multimodal_input_file no_add_special_tokens "
            "no_prompt_template no_repeat_ngram_size num_beams num_prepend_vtokens num_return_sequences output_csv "
            "output_cum_log_probs_npy output_log_probs_npy output_logits_npy output_npy presence_penalty "
            "prompt_table_path prompt_tasks random_seed repetition_penalty return_all_generated_tokens run_profiling "
            "sink_token_length stop_words streaming streaming_interval temperature tokenizer_dir tokenizer_type "
            "top_k top_p use_py_session vocab_file"
        ),
        partial=(
            PartialFlag("prompt_lookup_config", before="1.0.0"),
            *(
                PartialFlag(name, since="1.0.0")
                for name in words(
                    "backend beam_width_array eagle_dynamic_tree_max_top_k eagle_use_dynamic_tree "
                    "fail_fast_on_attention_window_too_large language_task_uids min_p ngram_config "
                    "no-kv_cache_enable_block_reuse output_generation_logits"
                )
            ),
        ),
        complete=False,
        source=("examples/run.py and examples/utils.py: 0.16.0.dev2024121000, and one stored version of 1.0 or later"),
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
        "yarn",
        "mrope",
    ),
    rope_scaling_kinds=("none", "linear", "dynamic", "longrope", "llama3", "yarn", "mrope"),
)
