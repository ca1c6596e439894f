"""A stand-in for trtllm-build: writes the files an engine folder has, and prints what the real one prints."""

import json
import os
import sys
from pathlib import Path

RELEASE = os.environ["STAND_IN_RELEASE"]


def main():
    words = sys.argv[1:]
    given = {}
    while words:
        name = words.pop(0).removeprefix("--")
        given[name] = words.pop(0) if words and not words[0].startswith("--") else True
    print(f"[TensorRT-LLM] TensorRT-LLM version: {RELEASE}")
    if os.environ.get("STAND_IN_BUILD_FAULT"):
        print(os.environ["STAND_IN_BUILD_FAULT"])
        return 1
    print("[TRT-LLM] [I] Build TensorRT engine Unnamed Network 0")
    checkpoint, out = Path(given["checkpoint_dir"]), Path(given["output_dir"])
    config = json.loads((checkpoint / "config.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    numbers = {name: int(value) for name, value in given.items() if str(value).isdigit()}
    build = {**numbers, "gather_generation_logits": "gather_generation_logits" in given}
    build |= {"max_draft_len": config["max_draft_len"], "speculative_decoding_mode": 4, "plugin_config": {}}
    document = {"version": RELEASE, "pretrained_config": config, "build_config": build}
    (out / "config.json").write_text(json.dumps(document))
    content = {
        "checkpoint": str(checkpoint.resolve()),
        "module_file": str(Path(given["model_cls_file"]).resolve()),
        "class_name": given["model_cls_name"],
    }
    (out / "rank0.engine").write_text(json.dumps(content))
    print("[TRT-LLM] [I] Total time of building Unnamed Network 0: 00:00:01")
    print(f"[TRT-LLM] [I] Serializing engine to {out}/rank0.engine...")
    print("[TRT-LLM] [I] Engine serialized. Total time: 00:00:01")
    print("[TRT-LLM] [I] Total time of building all engines: 00:00:01")
    return 0


sys.exit(main())
