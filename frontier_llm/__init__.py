"""Pretrain GPT and encoder-decoder models in tensor, pipeline and sharded data parallelism."""

import warnings

from frontier_llm import megatron_jit

__version__ = "0.2.0"

# Megatron warns at every import about optional libraries that are absent. This program chooses its
# kernels itself (`kernels=`), and every process of it imports this package first.
warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
# torch 2.13 gave two collectives other names, which the oldest torch that is supported lacks.
warnings.filterwarnings(
    "ignore",
    category=FutureWarning,
    message=r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated",
)
megatron_jit.stand_in()
