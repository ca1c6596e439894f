"""TensorRT-LLM 0.9: releases from 0.9.0.dev0 up to, not including, 0.10.0.dev0."""

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
    name="0.9",
    since="0.9.0.dev0",
    before="0.10.0.dev0",
    kernel=KernelLimits(
        dispatcher_head_sizes=(128, 256),
        tokens_per_block=(64, 128),
        compiled=(CompiledKernels(128, (None, 64, 128), (80, 86, 89, 90), (89, 90)),),
        group_power_of_two=True,
        multi_block_mode="ignored",
        kv_scale_applied=False,
        fp8_kv_uses_jit=False,
        no_kernel_message="No available XQA kernels are found for medusa mode.",
        init_message="Medusa mode doesn't support the data type or cross attention.",
        source=(
            "gptAttentionCommon.cpp, decoderXQARunner.h and cubin/xqa_kernel_cubin.h, 0.9.0.dev2024022700 and "
            "0.9.0.dev2024040900"
        ),
    ),
    build=BuildFacts(
        medusa_switch="max_draft_len",
        draft_limit_key="max_draft_len",
        plugin_types=("float16", "float32", "bfloat16", "disable"),
        speculative_modes=(),
        flags=words(
            "attention_qk_half_accumulation bert_attention_plugin build_config builder_opt checkpoint_dir "
            "context_fmha context_fmha_fp32_acc enable_xqa gather_all_token_logits gather_context_logits "
            "gather_generation_logits gemm_plugin gpt_attention_plugin log_level logits_dtype lookup_plugin "
            "lora_plugin max_batch_size max_beam_width max_input_len max_multimodal_len max_num_tokens "
            "max_output_len max_prompt_embedding_table_size model_cls_file model_cls_name model_config "
            "multi_block_mode output_dir paged_kv_cache profiling_verbosity remove_input_padding strongly_typed "
            "tokens_per_block use_context_fmha_for_generation use_custom_all_reduce use_fused_mlp "
            "use_paged_context_fmha weight_only_precision workers"
        ),
        partial=(
            PartialFlag("auto_parallel", since="0.9.0.dev2024031900"),
            PartialFlag("cluster_key", since="0.9.0.dev2024031200"),
            PartialFlag("dense_context_fmha", since="0.9.0.dev2024031200", before="0.9.0.dev2024032600"),
            PartialFlag("enable_debug_output", since="0.9.0.dev2024022000"),
            PartialFlag("gpus_per_node", since="0.9.0.dev2024031200"),
            PartialFlag("input_timing_cache", since="0.9.0.dev2024031900"),
            PartialFlag("lora_ckpt_source", since="0.9.0.dev2024031900"),
            PartialFlag("lora_dir", since="0.9.0.dev2024031900"),
            PartialFlag("lora_target_modules", since="0.9.0.dev2024031900"),
            PartialFlag("mamba_conv1d_plugin", since="0.9.0.dev2024032600"),
            PartialFlag("max_draft_len", since="0.9.0.dev2024022000"),
            PartialFlag("max_lora_rank", since="0.9.0.dev2024031900"),
            PartialFlag("moe_plugin", since="0.9.0.dev2024022000"),
            PartialFlag("multiple_profiles", since="0.9.0.dev2024031900"),
            PartialFlag("nccl_plugin", since="0.9.0.dev2024040900", before="0.9.0"),
            PartialFlag("opt_num_tokens", since="0.9.0.dev2024032600"),
            PartialFlag("output_timing_cache", since="0.9.0.dev2024031900"),
            PartialFlag("paged_state", since="0.9.0.dev2024032600"),
            PartialFlag("pos_shift", since="0.9.0.dev2024031200", before="0.9.0.dev2024032600"),
            PartialFlag("pp_size", since="0.9.0.dev2024031200"),
            PartialFlag("streamingllm", since="0.9.0.dev2024032600"),
            PartialFlag("timing_cache", before="0.9.0.dev2024031900"),
            PartialFlag("tp_size", since="0.9.0.dev2024031200"),
            PartialFlag("use_fp8_context_fmha", since="0.9.0.dev2024032600"),
            PartialFlag("weight_sparsity", since="0.9.0.dev2024032600"),
            PartialFlag("world_size", since="0.9.0.dev2024031200", before="0.9.0.dev2024031900"),
        ),
        source="commands/build.py and plugin/plugin.py, 0.9.0.dev2024020600 to 0.9.0.dev2024040900",
    ),
    run=RunFacts(
        needs_py_session=True,
        temperature="0.0",
        flags=words(
            "debug_mode engine_dir frequency_penalty input_file input_text length_penalty log_level "
            "lora_ckpt_source lora_dir lora_task_uids max_attention_window_size max_input_length max_output_len "
            "medusa_choices no_add_special_tokens no_prompt_template num_beams num_prepend_vtokens output_csv "
            "output_logits_npy output_npy presence_penalty prompt_table_path prompt_tasks repetition_penalty "
            "run_profiling sink_token_length streaming streaming_interval temperature tokenizer_dir "
            "tokenizer_type top_k top_p use_py_session vocab_file"
        ),
        partial=(
            PartialFlag("early_stopping", since="0.9.0.dev2024022700"),
            PartialFlag("output_cum_log_probs_npy", since="0.9.0.dev2024022700"),
            PartialFlag("output_log_probs_npy", since="0.9.0.dev2024022700"),
        ),
        source="examples/run.py and examples/utils.py, 0.9.0.dev2024020600 to 0.9.0.dev2024040900",
    ),
    position_kinds=(
        "learned_absolute",
        "rope_gptj",
        "rope_gpt_neox",
        "alibi",
        "alibi_with_scale",
        "relative",
        "chatglm",
    ),
    rope_scaling_kinds=("none", "linear", "dynamic"),
)
