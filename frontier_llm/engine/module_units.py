"""Divide a module into units: groups of parameters that are gathered and reduced together."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from frontier_llm.engine.shard_settings import AdamW, ParameterGroup
from frontier_llm.errors import ConfigError
from frontier_llm.protocols import ParameterRecord, Placement, UnitReader

REST = "rest"
"""Unit of the parameters that belong to no single layer. It stays gathered between the forward and
the backward pass."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a module: the elements of its outermost `nn.ModuleList`s, by name."""
    found: dict[str, nn.Module] = {}

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in parent.named_children():
            path = f"{prefix}{name}"
            if isinstance(child, nn.ModuleList):
                found.update((f"{path}.{index}", layer) for index, layer in enumerate(child))
            else:
                visit(child, f"{path}.")

    visit(module, "")
    return found


def records_of(
    module: nn.Module, layers: dict[str, nn.Module], update: AdamW
) -> list[ParameterRecord]:
    """Describe all parameters, those of the unit `REST` first, then layer by layer.

    A parameter that several layers use, or a layer and another module, belongs to `REST`. Raises a
    ConfigError if parameters differ in dtype or device, or their dtype is not in DTYPES.
    """
    records = list(_records(module, layers, update))
    parameters = [record.parameter for record in records]
    kinds = {(str(parameter.dtype), str(parameter.device)) for parameter in parameters}
    if len(kinds) != 1:
        raise ConfigError(
            "module",
            f"parameters of {len(kinds)} kinds: {sorted(kinds)}",
            "parameters of one dtype on one device",
            "convert the module first: module.to(device, dtype); to compute in bf16 with fp32 "
            "masters, keep the module in fp32 and pass precision=Precision(torch.bfloat16)",
        )
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None:
            raise ConfigError(
                "module",
                f"{name} with max_norm={child.max_norm}",
                "weights that only the update writes: each rank would shorten other rows",
                "use max_norm=None",
            )
    if parameters[0].dtype not in DTYPES:
        raise ConfigError(
            "module",
            f"parameters of {parameters[0].dtype}",
            "parameters of fp32, bf16 or fp16: masters are fp32",
            "convert the module first: module.float()",
        )
    return records


def readers_of(
    module: nn.Module, layers: dict[str, nn.Module], records: Sequence[ParameterRecord]
) -> list[UnitReader]:
    """Return the module, its layers, and the modules that own parameters of the unit `REST`."""
    unit_of = {id(record.parameter): record.unit for record in records}
    readers = [UnitReader(module, (REST,), release="without_grad")]
    owned = {id(child): child for child in module.modules() if child is not module}
    for layer in {id(layer): layer for layer in layers.values()}.values():
        units = {unit_of[id(parameter)] for parameter in layer.parameters()} - {REST}
        readers.append(UnitReader(layer, tuple(sorted(units))))
    for child in owned.values():
        own = child.parameters(recurse=False)
        if any(unit_of[id(parameter)] == REST for parameter in own):
            readers.append(UnitReader(child, (REST,), release="never"))
    return readers


def _records(
    module: nn.Module, layers: dict[str, nn.Module], update: AdamW
) -> Iterator[ParameterRecord]:
    of_tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    unit_of = _units(module, layers)
    settings = _settings(module, update)
    in_order = sorted(module.named_parameters(), key=lambda pair: unit_of[id(pair[1])] != REST)
    for name, parameter in in_order:
        shape, zeros = tuple(parameter.shape), (0,) * parameter.dim()
        own = settings.get(id(parameter))
        if id(parameter) in of_tables:
            group = "embedding"
        else:
            group = "matrices" if parameter.dim() > 1 else "norms"
        decay = None if own is None else own.weight_decay
        if own is not None and decay is None:
            decay = update.weight_decay if group in update.decayed else 0.0
        yield ParameterRecord(
            parameter=parameter,
            unit=unit_of[id(parameter)],
            placements=(Placement(name, shape, zeros, zeros, shape),),
            group=group,  # type: ignore[arg-type]
            counted=True,
            tensor_partial=False,
            tied=False,
            rate_factor=1.0 if own is None else own.rate_factor,
            weight_decay=decay,
        )


def _settings(module: nn.Module, update: AdamW) -> dict[int, ParameterGroup]:
    """Return the group of each parameter that has one, by its id."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[int, ParameterGroup] = {}
    for number, group in enumerate(update.groups):
        for parameter in group.params:
            name = names.get(id(parameter), f"{type(parameter).__name__}, not of the module")
            known = id(parameter) in names
            if not known or found.setdefault(id(parameter), group) is not group:
                wants = "parameters of the module, each in one group only"
                todo = "take them from the module that shard gets, and leave out the second"
                raise ConfigError(f"groups[{number}].params", name, wants, todo)
    return found


def _units(module: nn.Module, layers: dict[str, nn.Module]) -> dict[int, str]:
    distinct = {id(layer): (name, layer) for name, layer in reversed(layers.items())}
    inside = {id(child) for _, layer in distinct.values() for child in layer.modules()}
    users: dict[int, set[str]] = {}
    for name, layer in distinct.values():
        for parameter in layer.parameters():
            users.setdefault(id(parameter), set()).add(name)
    for child in module.modules():
        if id(child) not in inside:
            for parameter in child.parameters(recurse=False):
                users.setdefault(id(parameter), set()).add(REST)
    return {key: names.pop() if len(names) == 1 else REST for key, names in users.items()}
