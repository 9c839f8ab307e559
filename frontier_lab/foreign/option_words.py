"""Read options of commands, and how many processes a launcher starts."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from frontier_lab.foreign.shell_words import split_words

SWITCHES = set(
    """
    accumulate_allreduce_grads_in_fp32 add_qkv_bias bf16 checkpoint_activations deepspeed
    deepspeed_activation_checkpointing disable_bias_linear fp16 fp8_param_gather
    grad_reduce_in_bf16 group_query_attention overlap_grad_reduce overlap_param_gather
    qk_layernorm recompute_activations sequence_parallel swiglu tp_comm_overlap
    untie_embeddings_and_output_weights use_distributed_optimizer use_flash_attn use_flash_attn_v2
    use_mcore_models use_megatron_fsdp use_rotary_position_embeddings use_torch_fsdp2
    """.split()
)
"""Options without a value."""


def flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of options, and variables of unknown value that may hold other options."""
    values: dict[str, Any] = {}
    unknown: list[str] = []
    name = ""
    for word in (
        part for each in words for part in (split_words(each) if "--" in each else [each])
    ):
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if "$" in name:
                unknown.append(word)
                name = ""
                continue
            values[name] = value if has_value else True
        elif re.fullmatch(r"[0-9]?(?:[|>&;]+|2>&1)[^\s|]*", word):
            break  # of a command in a variable
        elif re.fullmatch("-(?:[A-Za-z][0-9]*|np|npernode|ppn)", word):
            name = word[1:] if word[1:3] in ("np", "pp") else word[1]
            values[name] = word[2:] if word[2:].isdigit() else True
        elif re.fullmatch(r"\$(?:[\w@*]+|\{[^}]*\}|\(.*\))|`.*`", word, re.DOTALL) and (
            not name or name in SWITCHES or values[name] is not True
        ):
            unknown += [word] if word not in unknown and "path" not in name else []
        elif name:
            values[name] = word if values[name] is True else f"{values[name]} {word}"
    return values, unknown


def sbatch(text: str) -> dict[str, Any]:
    """Return the options of the lines #SBATCH of a script."""
    words = re.findall(r"^#SBATCH[ \t]+(.*?)(?:[ \t]#.*)?$", text, re.MULTILINE)
    return flags(" ".join(words).split())[0]


def _digits(launched: Mapping[str, Any], *names: str) -> int | None:
    """Return the number at the end of the first of some options; None = there is none."""
    texts = (str(launched.get(name, "")).strip("\"'\r") for name in names)
    found = (re.fullmatch(r"(?:[^$`]*\D)?(\d{1,7})", text) for text in texts)
    return next((int(digits[1]) for digits in found if digits), None)


def slurm(batch: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the variables that Slurm sets for a job with these options."""
    nodes, gpus = _digits(batch, "nodes", "N"), _digits(batch, "gpus_per_node", "gres")
    each = _digits(batch, "ntasks_per_node")
    tasks = _digits(batch, "ntasks", "n") or (nodes * each if nodes and each else None)
    sizes = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": each,
        "SLURM_GPUS_PER_NODE": gpus,
        "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_CPUS_PER_TASK": _digits(batch, "cpus_per_task", "c"),
    }
    return {name: [str(size)] for name, size in sizes.items() if size}


def world_size(launched: Mapping[str, Any]) -> int | None:
    """Return the number of processes that torchrun, deepspeed or srun start, if it is known."""
    nodes = _digits(launched, "nnodes", "num_nodes", "nodes", "N")
    tasks, gpus = _digits(launched, "ntasks_per_node"), _digits(launched, "gpus_per_node", "gres")
    each = _digits(launched, "nproc_per_node", "num_gpus", "npernode", "ppn")
    if each is None:  # one task of a node may start a process for each GPU
        each = gpus if gpus and tasks in (None, 1) else tasks
    elif "nproc_per_node" in launched and nodes is None and "nnodes" not in launched:
        nodes = 1  # the default of torchrun
    total = _digits(launched, "np", "ntasks", "n", "gpus", "G")
    return nodes * each if nodes and each else total
