"""The modules of a run whose kernels are compared: one layer of each kind, of one tensor rank.

They are built by the functions that build the modules of a run. The process groups have one rank,
so that a module has the sizes of a tensor rank and sends nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from frontier_lab.numerics.references import Arithmetic, Number
from frontier_lab.single_process_model import ON_ONE_RANK, groups_of_one_rank
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.device.kernels import Kernels, resolve
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.build import Model, build_model
from frontier_llm.model.transformer import DTYPES
from frontier_llm.parallel.groups import Groups

HOST_OPERATIONS, DEVICE_OPERATIONS = 1e11, 4e11
"""Operations that the reference of a kernel may take, and those of a kernel on a CPU. Rows, queries
or tokens beyond them are left out, and the shape in the table says so."""
SMALL = {"vocabulary": 512, "hidden": 256, "ffn": 512}
"""Largest dimensions of the model whose optimizer is compared."""


class Check(NamedTuple):
    """A kernel on a device, compared with its reference."""

    kernel: str
    implementation: str
    shape: str
    dtype: str
    error: float
    """Error of the element that exceeds its bound most, or comes nearest to it, in units of the
    reference's root mean square."""
    bound: float
    """Bound of this element, in the same units."""
    worst: str
    """The result that has this element, such as `gradient of the keys`; or an exception."""

    @property
    def is_right(self) -> bool:
        """Whether all elements are within their bounds."""
        return self.error <= self.bound


Pairs = dict[str, tuple[Tensor, Number]]
"""By the name of a result: what the kernel gave, and the reference."""


def check(
    s: "Subject", kernel: str, implementation: str, run: Callable[[], tuple[str, Pairs]]
) -> Check:
    """Run a kernel and compare its results."""
    dtype = next(name for name, dtype in DTYPES.items() if dtype == s.dtype)
    try:
        shape, pairs = run()
        error, bound, worst = _worst_of(pairs)
    except Exception as raised:  # any failure of a compiler, of a driver or of a shape
        first = (str(raised) or repr(raised)).strip().splitlines()[0]
        shape, error, bound, worst = "", torch.inf, 0.0, f"{type(raised).__name__}: {first}"
    return Check(kernel, implementation, shape, dtype, error, bound, worst)


def paired(ours: Iterable[Tensor], expected: dict[str, Number]) -> Pairs:
    """Pair the results of a kernel with those of a reference, in the same order."""
    return dict(zip(expected, zip(ours, expected.values(), strict=True), strict=True))


def gradients(output: Tensor, grad: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of leaves for a gradient of the output."""
    for leaf in leaves:
        leaf.grad = None
    output.backward(grad)
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


class PassThrough(nn.Module):
    """A module in place of a linear layer, which returns its input and a bias."""

    def __init__(self, bias: Tensor | None = None) -> None:
        super().__init__()
        self._bias = bias

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input and the bias."""
        return x, self._bias


def _worst_of(pairs: Pairs) -> tuple[float, float, str]:
    """Return the error and the bound of the worst element, and the name of its result."""
    found = []
    for name, (ours, reference) in pairs.items():
        ours = ours.detach().cpu().double()
        if ours.shape != reference.value.shape:
            shapes = f"{tuple(ours.shape)}, not {tuple(reference.value.shape)}"
            found.append((torch.inf, torch.inf, 0.0, f"shape of the {name}: {shapes}"))
            continue
        size = float(reference.value.square().mean().sqrt()) or 1.0
        errors, bounds = (ours - reference.value).abs(), reference.bound
        errors = errors.nan_to_num(torch.inf, torch.inf)
        # an error of 0 is right even where no error is allowed
        ratios = torch.where(errors > 0, errors / bounds, 0.0).flatten()
        at = int(ratios.argmax())
        ratio, error = float(ratios[at]), float(errors.flatten()[at]) / size
        found.append((ratio, error, float(bounds.flatten()[at]) / size, name))
    _, error, bound, name = max(found)
    return error, bound, name


@dataclass
class Subject:
    """The modules, and what their kernels compute with."""

    config: RunConfig
    """The configuration of the run, with the dimensions of one tensor rank."""
    layout: ResolvedLayout
    groups: Groups
    model: Model
    kernels: Kernels
    arithmetic: Arithmetic
    device: torch.device
    generator: torch.Generator

    def side(self, layer: int) -> "Subject":
        """Return the same with the dimensions of a layer, those of the encoder or the decoder."""
        model = self.layout.model.side(layer)
        return replace(self, layout=replace(self.layout, model=model))

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the run."""
        return self.arithmetic.dtype

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normal numbers on the device, in the format of the run."""
        x = torch.randn(shape, generator=self.generator, device=self.device)
        return (x * scale).to(self.dtype)

    @property
    def elementwise(self) -> str:
        """How rotary positions and activations are computed."""
        return "compiled" if self.kernels.compiles_functions else "torch"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, of the longer one of encoder and decoder."""
        return (
            max(self.layout.lengths.encoder, self.layout.lengths.decoder) * self.layout.micro_batch
        )

    def affordable(self, count: int, cost: int, least: int, *, on_device: bool = False) -> int:
        """Return how many of `count` rows, but at least `least`, are compared.

        The cost of a row is in operations, on the host for the reference or on the device, which
        limits them only if it is a CPU.
        """
        limit = DEVICE_OPERATIONS if on_device else HOST_OPERATIONS
        if on_device and self.device.type != "cpu":
            return count
        return min(count, max(least, int(limit / cost)))

    def integers(self, limit: int, *shape: int) -> Tensor:
        """Return random numbers below a limit, on the device."""
        return torch.randint(0, limit, shape, generator=self.generator, device=self.device)

    def rows_near(self, epsilon: float, *shape: int) -> Tensor:
        """Return random rows; the mean squares of some are as small as epsilon."""
        rows = torch.rand(*shape[:-1], 1, generator=self.generator, device=self.device)
        return (self.random(*shape).float() * epsilon ** (rows * 0.6)).to(self.dtype)

    def some(self, count: int, limit: int) -> Tensor:
        """Return at most `limit` of `count` indices: one in each of as many equal ranges."""
        if count <= limit:
            return torch.arange(count)
        edges = torch.linspace(0, count, limit + 1, dtype=torch.float64).long()
        draws = torch.rand(limit, generator=self.generator, device=self.device).cpu()
        chosen = edges[:-1] + (draws * edges.diff()).long()
        chosen[0], chosen[-1] = 0, count - 1
        return chosen

    def fill(self, module: torch.nn.Module) -> None:
        """Overwrite the parameters: matrices such that outputs are near 1, vectors near 1 or 0."""
        with torch.no_grad():
            for name, p in module.named_parameters():
                scale = p.shape[-1] ** -0.5 if p.dim() > 1 else 0.2
                is_norm = p.dim() == 1 and name.endswith("weight")
                p.copy_(self.random(*p.shape, scale=scale) + float(is_norm))


@contextmanager
def subject(
    config: RunConfig, accelerator: Accelerator, precision: str, seed: int, *, small: bool = False
) -> Iterator[Subject]:
    """Build the modules; the process must have no process group, and has none afterwards."""
    device, dtype = accelerator.device, DTYPES[precision]
    kernels = resolve(config.kernels, device, dtype, config.model.hidden)
    config = _on_one_rank(config, SMALL if small else {})
    with groups_of_one_rank(device) as groups:
        layout = ResolvedLayout.resolve(
            config, 1, 1, precision=precision, ignore_sharding=True, check_rules=False
        )
        model = build_model(layout, groups, device, kernels, seed)
        generator = torch.Generator(device).manual_seed(seed)
        arithmetic = Arithmetic.of(dtype, device)
        yield Subject(config, layout, groups, model, kernels, arithmetic, device, generator)


def _on_one_rank(config: RunConfig, limits: dict[str, int]) -> RunConfig:
    """Return the configuration of one tensor rank with one layer of each kind, without dropout."""
    model, tensor = config.model, config.parallel.tensor
    changes: dict[str, Any] = {
        **_sizes(model, tensor, limits),
        **{f"encoder_{k}": size for k, size in _sizes(model.encoder, tensor, limits).items()},
        "vocabulary": padded_vocabulary(model, tensor) // tensor
        if tensor > 1
        else model.vocabulary,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    stacks, both = 1 + (model.kind == "t5"), model.window is not None and model.window_every > 1
    changes |= {"layers": stacks * (1 + both), "encoder_layers": (stacks - 1) * (1 + both)}
    changes["window_every"] = 1 + both
    if limits:
        changes["vocabulary"] = min(limits["vocabulary"], changes["vocabulary"])
    return config.changed("model", **changes).changed("parallel", **ON_ONE_RANK)


def _sizes(model: ModelConfig, tensor: int, limits: dict[str, int]) -> dict[str, int]:
    """Return the dimensions of a side of the model on one tensor rank."""
    heads, key_heads = model.heads // tensor, max(1, model.kv_heads // tensor)
    groups = min(key_heads, 2) if limits else key_heads
    whole = {"hidden": model.hidden, "ffn": model.ffn // tensor}
    limited = {name: min(size, limits.get(name, size)) for name, size in whole.items()}
    return {**limited, "kv_heads": groups, "heads": groups * (heads // key_heads)}


def shape_of(*parts: tuple[str, int, int] | tuple[str, int]) -> str:
    """Describe a shape: `256 tokens x 512 of 4096 outputs`."""
    words: Sequence[str] = [
        f"{part[1]} {part[0]}"
        if len(part) == 2 or part[1] == part[2]
        else f"{part[1]} of {part[2]} {part[0]}"
        for part in parts
    ]
    return " x ".join(words)
