"""TensorRT-LLM 0.8: releases from 0.8.0.dev2024013000 up to, not including, 0.9.0.dev0."""

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
    name="0.8",
    since="0.8.0.dev2024013000",
    before="0.9.0.dev0",
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
            "gptAttentionCommon.cpp, decoderXQARunner.h and cubin/xqa_kernel_cubin.h, 0.8.0.dev2024013000 and v0.8.0"
        ),
    ),
    build=BuildFacts(
        medusa_switch="config",
        draft_limit_key="max_medusa_token_len",
        plugin_types=("float16", "float32", "bfloat16", "disable"),
        speculative_modes=(),
        flags=words(
            "attention_qk_half_accumulation bert_attention_plugin build_config builder_opt checkpoint_dir "
            "context_fmha context_fmha_fp32_acc enable_xqa gather_all_token_logits gather_context_logits "
            "gather_generation_logits gemm_plugin gpt_attention_plugin log_level logits_dtype lookup_plugin "
            "lora_plugin max_batch_size max_beam_width max_input_len max_multimodal_len max_num_tokens "
            "max_output_len max_prompt_embedding_table_size model_cls_file model_cls_name model_config "
            "multi_block_mode output_dir paged_kv_cache profiling_verbosity remove_input_padding strongly_typed "
            "timing_cache tokens_per_block use_context_fmha_for_generation use_custom_all_reduce "
            "use_paged_context_fmha weight_only_precision workers"
        ),
        partial=(
            PartialFlag("enable_debug_output", since="0.8.0"),
            PartialFlag("use_fused_mlp", since="0.8.0"),
        ),
        source="commands/build.py and plugin/plugin.py, 0.8.0.dev2024013000 and 0.8.0",
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
        source="examples/run.py and examples/utils.py, 0.8.0.dev2024013000",
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
