"""Pretraining of GPT and encoder-decoder models, cut by tensor, pipeline and sharded data axes."""

import warnings

__version__ = "0.1.0"

# At every import megatron tells of libraries that it misses; which are used is a choice here
# (`kernels=`), and every program of this project imports this package first.
warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
