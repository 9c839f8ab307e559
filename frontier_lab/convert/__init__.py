"""Convert weights between checkpoints of frontier_llm and Hugging Face's format.

The command `frontier-llm convert` (commands/convert) calls this package. In its modules "our" and
"ours" refer to frontier_llm, and "their" and "theirs" to Hugging Face. A *family* is a set of
models with the same architecture, such as Llama.

table              the table of a family: which of our tensors corresponds to which of theirs, and
                   the transforms between them
base_family        the interface of a family, and the keys of its config.json
decoders           the families GPT-2, GPT-NeoX, and Llama with its relatives
encoder_decoders   the families T5 and mT5
families           the list of all families, and the choice of one for a model
ours               reads and writes our weights one tensor at a time
theirs             reads and writes their folders of config.json and safetensors files
tokenizer_files    copies the tokenizer that belongs to a model
compare_logits     runs both models on the same tokens
"""
