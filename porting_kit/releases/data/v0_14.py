"""TensorRT-LLM 0.14: releases from 0.14.0.dev0 up to, not including, 0.15.0.dev0."""

from porting_kit.releases.facts import KernelLimits, ReleaseFacts

FACTS = ReleaseFacts(
    name="0.14",
    since="0.14.0.dev0",
    before="0.15.0.dev0",
    kernel=KernelLimits(
        head_sizes=(128, 256),
        kernel_head_sizes=(128,),
        tokens_per_block=(64, 128),
        compute_capabilities=(80, 86, 89, 90),
        fp8_kv_compute_capabilities=(89, 90),
        group_power_of_two=False,
        multi_block_mode="switched off",
        kv_scale_applied=True,
        fp8_kv_uses_jit=False,
        no_kernel_message="No available XQA kernels are found for speculative decoding mode.",
        init_message="Speculative decoding mode doesn't support the data type or cross attention.",
        source="gptAttentionCommon.cpp and decoderXQAImplPrecompiled.cpp, 0.14.0.dev2024100800 (commit 8681b3a4)",
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
    rope_scaling_kinds=("none", "linear", "dynamic", "longrope", "llama3"),
)
