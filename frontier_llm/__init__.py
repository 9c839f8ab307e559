"""Pretrain GPT and encoder-decoder models in tensor, pipeline and sharded data parallelism."""

import warnings

from frontier_llm import megatron_jit

__version__ = "0.2.0"

# Megatron warns at every import about optional libraries that are absent. This program chooses its
# kernels itself (`kernels=`), and every process of it imports this package first.
warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
megatron_jit.stand_in()
