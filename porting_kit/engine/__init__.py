"""From a Medusa checkpoint to an engine: the exact build command, its run, and the files an engine leaves behind.

`run` is the only module of the package that looks for tensorrt_llm, and it does so lazily: on a machine without it
every plan can still be made and checked, and files brought back from another machine can be read.
"""
