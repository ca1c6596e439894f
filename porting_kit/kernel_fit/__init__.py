"""Transforms that make a model fit the attention kernels of a release, and the plan that chooses among them.

With speculative decoding a release has one kernel family in the generation phase, for few head sizes, no ALiBi, no
query scaling. Each transform changes config and weights so that the kernel computes what the model means:
`plan_fit` chooses (no weights, no torch), `apply_fit` carries out, `follow_fit` makes the model's source read the
fitted settings from its config.

Letters: E hidden size, D head size, H query heads, K key/value heads, P rotary pairs, L layers, C content dims.
"""
