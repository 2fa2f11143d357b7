"""Reads and writes models: public checkpoints, pairs trained here, and their tokenizers.

hugging_face.py    checkpoints in the format of Hugging Face: open_checkpoint, read_params, write_converted
  hub.py           finds its folder, or downloads it
  architectures.py reads config.json, with fields.py and rope.py
  tensor_names.py  finds the tensor of each parameter
  safetensors_io.py, orbax.py   the two formats of tensors
  int8_tensors.py  weights in int8, as files hold them or quantised while they are read
public_pair.py     two such checkpoints, or a checkpoint and a head (heads.py), as a pair: read_pair
published.py       config.json of public models, for plans that need no download
pair.py            a pair trained here, in a folder: load_pair, save_pair
chat.py            chat templates, which run in a process of their own: chat_sandbox.py
export.py          a model trained here as a folder for transformers
tokenizer.py       the tokenizer of a tokenizer.json
"""
