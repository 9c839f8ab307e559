"""Convert checkpoints of train.py to those of torch.distributed.checkpoint, and back.

python convert.py to_dcp runs/torchtitan_loop runs/dcp
python convert.py from_dcp runs/dcp runs/torchtitan_loop
"""

import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from model import Transformer
from torch.distributed.checkpoint.state_dict import get_state_dict

from frontier_llm.checkpoint.torch_dcp import Reader, Writer

direction, source, target = sys.argv[1:]
model = Transformer()
weights, moments = get_state_dict(model, torch.optim.AdamW(model.parameters()))
states: dict[str, Any] = {"model": weights, "optim": moments}
if direction == "to_dcp":
    dcp.load(states, storage_reader=Reader(source))
    dcp.save(states, checkpoint_id=target)
else:
    dcp.load(states, checkpoint_id=source)
    step = int(states["optim"]["state"]["table.weight"]["step"])
    dcp.save(states, storage_writer=Writer(target, step))
