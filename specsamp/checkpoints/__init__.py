"""Public checkpoints, in and out: config, tensors, tokenizer and stop tokens of a folder, a bucket or the hub."""
