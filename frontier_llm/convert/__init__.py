"""Convert weights between this project's checkpoints and Hugging Face's format.

In this package "our" model is the one of this project, and "their" model is Hugging Face's.

transforms         how one of our tensors becomes their tensors, and the inverse
table              the rows of a family: our name, their names, the transform
settings           the keys of their config.json and the keys of our configuration
base_family        the interface of a family of models
decoders           the families GPT-2, GPT-NeoX and Llama
encoder_decoders   the families T5 and mT5
families           the list of families, and how one is chosen
ours               reads and writes our weights one tensor at a time
theirs             reads and writes their folders of config.json and safetensors files
tokenizer_files    copies the tokenizer that belongs to a model
compare_logits     runs both models on the same tokens
"""
