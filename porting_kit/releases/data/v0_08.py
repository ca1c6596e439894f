"""TensorRT-LLM 0.8: releases from 0.8.0.dev0 up to, not including, 0.9.0.dev0."""

from porting_kit.releases.facts import KernelLimits, ReleaseFacts

FACTS = ReleaseFacts(
    name="0.8",
    since="0.8.0.dev0",
    before="0.9.0.dev0",
    kernel=KernelLimits(
        head_sizes=(128, 256),
        kernel_head_sizes=(128,),
        tokens_per_block=(64, 128),
        compute_capabilities=(80, 86, 89, 90),
        fp8_kv_compute_capabilities=(89, 90),
        group_power_of_two=True,
        multi_block_mode="ignored",
        kv_scale_applied=False,
        fp8_kv_uses_jit=False,
        no_kernel_message="No available XQA kernels are found for medusa mode.",
        init_message="Medusa mode doesn't support the data type or cross attention.",
        source="gptAttentionCommon.cpp, decoderXQARunner.h and kernel file names, v0.8.0 and 0.8.0.dev2024013000",
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
