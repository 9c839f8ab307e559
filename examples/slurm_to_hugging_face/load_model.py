"""Load a converted model with transformers and continue a prompt.

python examples/slurm_to_hugging_face/load_model.py FOLDER "import "
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 20
"""Length of the continuation."""


def main(folder: str, prompt: str) -> None:
    """Print the number of parameters and the most likely continuation of the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        continued = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    print(f"{folder}: {model.num_parameters():,} parameters")
    print(tokenizer.decode(continued[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
