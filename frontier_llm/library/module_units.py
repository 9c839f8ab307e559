"""Divide a module into units: groups of parameters that are gathered and reduced together."""

from collections.abc import Iterator

from torch import nn

from frontier_llm.errors import ConfigError
from frontier_llm.protocols import ParameterRecord, Placement

REST = "rest"
"""Unit of the parameters outside all layers. It stays gathered during forward and backward pass."""


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


def records_of(module: nn.Module, layers: dict[str, nn.Module]) -> list[ParameterRecord]:
    """Describe all parameters, those outside the layers first, then layer by layer.

    A parameter that several modules share belongs to the first of them.

    Raises:
        ConfigError: parameters differ in dtype or device, or a parameter of a layer is also used
            outside of it.
    """
    records = list(_records(module, layers))
    parameters = [record.parameter for record in records]
    kinds = {(str(parameter.dtype), str(parameter.device)) for parameter in parameters}
    if len(kinds) != 1:
        raise ConfigError(
            "module",
            f"parameters of {len(kinds)} kinds: {sorted(kinds)}",
            "parameters of one dtype on one device",
            "convert the module first: module.to(device, dtype)",
        )
    return records


def _records(module: nn.Module, layers: dict[str, nn.Module]) -> Iterator[ParameterRecord]:
    of_tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    unit_of = {
        id(parameter): unit for unit, layer in layers.items() for parameter in layer.parameters()
    }
    named = list(module.named_parameters())
    in_order = sorted(named, key=lambda pair: id(pair[1]) in unit_of)  # stable
    for name, parameter in in_order:
        shape, zeros = tuple(parameter.shape), (0,) * parameter.dim()
        if id(parameter) in of_tables:
            group = "embedding"
        else:
            group = "matrices" if parameter.dim() > 1 else "norms"
        yield ParameterRecord(
            parameter=parameter,
            unit=unit_of.get(id(parameter), REST),
            placements=(Placement(name, shape, zeros, zeros, shape),),
            group=group,  # type: ignore[arg-type]
            counted=True,
            tensor_partial=False,
            tied=False,
        )
