"""Reads and writes models: public checkpoints, pairs trained here, and their tokenizers.

hugging_face.py    Hugging Face checkpoints: open_checkpoint, read_params, write_converted
  hub.py           finds or downloads the folder of a checkpoint
  architectures.py reads config.json by the tables of architectures.json, with fields.py and rope.py
  tensor_names.py  finds the tensor of each parameter
  safetensors_io.py, orbax.py   the two formats of tensors
  int8_tensors.py  weights in int8, as files hold them or quantised while they are read
public_heads.py    heads of such models: open_head, read_head; with head_config.py and pickles.py
public_pair.py     two such checkpoints, or a checkpoint and a head: read_pair, check_pair
published.py       config.json of public models, for plans that need no download
trained_pair.py    pairs trained here, each in a folder: load_pair, save_pair
export.py          writes a trained model as a folder for transformers; head_export.py a head
tokenizer.py       the tokenizer of a tokenizer.json
vocabulary.py      the tokens that two tokenizers share: match_vocabularies
chat.py            chat templates, which run in a separate process: chat_sandbox.py
"""
