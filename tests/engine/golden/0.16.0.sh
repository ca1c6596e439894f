# for TensorRT-LLM 0.16.0
trtllm-build \
    --checkpoint_dir checkpoint \
    --output_dir engine \
    --model_cls_file patched/medusa_bloom.py \
    --model_cls_name MedusaBloomForCausalLM \
    --gpt_attention_plugin float16 \
    --gemm_plugin float16 \
    --remove_input_padding enable \
    --tokens_per_block 64 \
    --max_batch_size 8 \
    --max_input_len 1024 \
    --max_seq_len 2048 \
    --max_beam_width 1 \
    --max_num_tokens 8192 \
    --speculative_decoding_mode medusa \
    --max_draft_len 63 \
    --workers 2

# for TensorRT-LLM 0.16.0
mpirun -n 2 --allow-run-as-root python examples/run.py \
    --engine_dir engine \
    --tokenizer_dir base \
    --input_file prompts.csv \
    --max_input_length 130 \
    --max_output_len 64 \
    --medusa_choices '[[0], [0, 0], [1]]' \
    --temperature 1.0 \
    --top_k 1 \
    --num_beams 1 \
    --output_npy output.npy \
    --end_id 2
