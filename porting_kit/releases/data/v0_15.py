"""TensorRT-LLM 0.15 to 0.17: releases from 0.15.0.dev0 up to, not including, 0.18.0.dev2025031100."""

from porting_kit.releases.facts import KernelLimits, ReleaseFacts

FACTS = ReleaseFacts(
    name="0.15 to 0.17",
    since="0.15.0.dev0",
    before="0.18.0.dev2025031100",
    kernel=KernelLimits(
        head_sizes=(128, 256),
        kernel_head_sizes=(128,),
        tokens_per_block=(32, 64, 128),
        compute_capabilities=(80, 86, 89, 90),
        fp8_kv_compute_capabilities=(89, 90),
        group_power_of_two=False,
        multi_block_mode="switched off",
        kv_scale_applied=True,
        fp8_kv_uses_jit=False,
        no_kernel_message="No available XQA kernels are found for speculative decoding mode.",
        init_message="Speculative decoding mode doesn't support the data type or cross attention.",
        source=(
            "gptAttentionCommon.cpp and decoderXQAImplPrecompiled.cpp, later than 0.14.0.dev2024100800 "
            "(releases bracketed, not pinned)"
        ),
        inferred="head size 64 fails in 0.16.0 and works in 0.18.0.dev2025031100; between them 128 only is assumed",
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
