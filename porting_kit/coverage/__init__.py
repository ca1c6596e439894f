"""Coverage: every decoder class of a TensorRT-LLM tree patched, run and compared with Hugging Face.

`cover_tree` makes the rows, `page` writes the how-to page from their JSON. The random models come from
`reference_models` (transformers' own classes) and `foreign_models` (families that transformers does not have,
re-expressed from a relative that computes the same).
"""
