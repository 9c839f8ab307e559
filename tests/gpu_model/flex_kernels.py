"""Run and compile the GPU's kernels of FlexAttention without a GPU.

    python -m tests.gpu_model.flex_kernels compare CASE     # run them in Triton's interpreter
    python -m tests.gpu_model.flex_kernels compile CHIP     # compile them for a chip

TorchInductor generates the kernels for CUDA tensors without memory. `compare` needs
TRITON_INTERPRET=1, runs them on CPU tensors and compares with attention written out. Both print
JSON.
"""

import inspect
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import torch._subclasses.fake_tensor as fake_tensor
import triton
from torch._inductor import async_compile
from torch._inductor.choices import InductorChoices
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.template_heuristics import triton as heuristics
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from frontier_llm.model import flex
from frontier_llm.model.reads import Documents, Reads, Scores

HEADS, REACH = 2, 20
TOKENS = flex.BLOCK + 22
CASES: dict[str, tuple[bool, list[int] | None]] = {
    "causal": (True, None),
    "padded": (False, [TOKENS, 7]),
}
"""Whether attention is causal, and the tokens of each sample if there is padding."""
CHIPS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class Kernel:
    """A generated kernel, with the arguments of the decorator under which it was generated."""

    def __init__(self, kind: str, function: Any, options: dict[str, Any]) -> None:
        self.kind, self.function, self.options = kind, function, options

    def run(self, *arguments: Any, stream: int) -> None:
        """Run all programs of the kernel in Triton's interpreter."""
        names = list(inspect.signature(self.function.fn).parameters)
        if self.kind == "template":  # the arguments end with the grid
            self.function[arguments[-3:]](*arguments[:-3])
        else:
            blocks = {name: 64 for name in ("XBLOCK", "YBLOCK") if name in names}
            counts = [arguments[names.index(f"{name[0].lower()}numel")] for name in blocks]
            self.function[tuple(-(-count // 64) for count in counts)](*arguments, **blocks)

    def compile(self, target: GPUTarget) -> Any:
        """Compile the kernel as TorchInductor does at its first call."""
        meta = self.options["triton_meta"]
        source = ASTSource(self.function, meta["signature"], {}, meta["configs"][0])
        chosen = self.options["inductor_meta"]["config_args"]
        options = {name: self.options[name] for name in ("num_warps", "num_stages")}
        if target.backend == "hip":
            amd = ("waves_per_eu", "matrix_instr_nonkdim")
            options |= {name: chosen[name] for name in amd if name in chosen}
            options["kpack"] = 2  # TorchInductor's default on ROCm; a CUDA build takes 0
        return triton.compile(source, target=target, options=options)


class Generated:
    """Stands in for torch's compiler of kernels, which would load them on the GPU."""

    def triton(self, name: str, source: str, device_str: str = "") -> Kernel:
        kernel: Kernel = getattr(PyCodeCache.load(source), name)
        return kernel

    def wait(self, _: Any) -> None: ...


def program(code: str) -> dict[str, Any]:
    """Execute a generated program; return its names. Its tensors are on the CPU."""

    def recorder(kind: str) -> Any:
        return lambda **options: lambda function: Kernel(kind, function, options)

    PyCodeCache.cache_clear()  # TorchInductor may have loaded the kernels with its own decorators
    names: dict[str, Any] = {"__name__": "generated", "__file__": __file__}
    with ExitStack() as stack:
        for kind in ("template", "pointwise", "persistent_reduction"):
            stack.enter_context(mock.patch.object(triton_heuristics, kind, recorder(kind)))
        stack.enter_context(mock.patch.object(async_compile, "AsyncCompile", Generated))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu"))
        exec(code, names)
    names["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype
    )
    names["get_raw_stream"] = lambda _: 0
    return names


def generate(
    inputs: list[torch.Tensor], reads: Reads, target: GPUTarget
) -> tuple[str, str, list[torch.Tensor]]:
    """Generate the programs of the forward and the backward pass.

    Args:
        inputs: query, key and value, on the simulated GPU.
        reads: what is read, and the kernel with its bias, on the simulated GPU.
        target: the chip.

    Returns:
        Both programs, and the tensors that the forward program reads, in its order.
    """
    programs: list[str] = []
    read: list[torch.Tensor] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        nodes = graph.graph.find_nodes(op="placeholder")
        read.extend(node.meta["grapharg"].example for node in nodes)
        return compile_fx(graph, examples)

    with _without_device(target, programs), mock.patch.object(flex, "COMPILER", backend):
        try:
            kernel_of(reads).attend(*inputs, reads, Scores(scale=1.0))
        except Exception:  # at the start of the first kernel
            if len(programs) != 2:
                raise
    backward, forward = sorted(programs, key=lambda code: "tangents" not in code)
    return forward, backward, read


@contextmanager
def _without_device(target: GPUTarget, programs: list[str]) -> Iterator[None]:
    """Make TorchInductor generate code for a chip that is not there, and keep the code."""
    driver = mock.Mock()
    driver.get_current_target.return_value = target
    driver.get_current_device.return_value = 0
    triton.runtime.driver.set_active(driver)
    patches = [
        mock.patch.object(torch._inductor.config, "compile_threads", 1),
        mock.patch.object(torch._inductor.config, "fx_graph_cache", False),
        mock.patch.object(torch._functorch.config, "enable_autograd_cache", False),
        mock.patch.object(torch._functorch.config, "force_non_lazy_backward_lowering", True),
        mock.patch.object(joint_graph, "lazy_init"),  # its patterns are traced on the device
        mock.patch.object(triton_heuristics.CachingAutotuner, "precompile"),
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(programs.append)),
    ]
    if target.backend == "hip":
        sizes = heuristics.ROCmConfigHeuristic()
        patches.append(
            mock.patch.object(InductorChoices, "get_config_heuristics", return_value=sizes)
        )
    else:
        capability = divmod(target.arch, 10)
        patches.append(
            mock.patch.object(torch.cuda, "get_device_capability", return_value=capability)
        )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """Allow CUDA tensors without memory within this context."""
    with (
        mock.patch.object(torch.cuda, "_lazy_init"),
        mock.patch.object(fake_tensor, "init_gpu_context"),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def make_inputs(
    tokens: int, heads: int, width: int, lengths: list[int] | None, causal: bool, **options: Any
) -> tuple[list[torch.Tensor], Reads, list[torch.Tensor]]:
    """Return query, key and value of two samples, what is read, and all of their tensors."""
    generator = None if "dtype" in options else torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(tokens, 2, heads, width, generator=generator, **options)
        .requires_grad_()
        .permute(1, 2, 0, 3)
        for _ in range(3)
    ]
    table = torch.randn(2 * REACH + 1, heads, generator=generator, **options).requires_grad_()
    device = options.get("device", "cpu")
    keys = None
    if lengths is not None:
        mask = torch.arange(tokens, device=device) < torch.tensor(lengths)[:, None].to(device)
        keys = Documents.padded(mask)
    reads = Reads(after=1 if causal else None, keys=keys)
    kernel = flex.FlexKernel.of(reads, tokens, inputs[0].device, table)
    tensors = [*inputs, kernel.bias, *([] if keys is None else [keys.ids])]
    if kernel.blocks is not None:
        tensors += [part for part in kernel.blocks.as_tuple() if isinstance(part, torch.Tensor)]
    return inputs, replace(reads, kernel=kernel), tensors


def kernel_of(reads: Reads) -> flex.FlexKernel:
    assert isinstance(reads.kernel, flex.FlexKernel)
    return reads.kernel


def compare(case: str) -> dict[str, float]:
    """Return the largest differences of the output and of each gradient, in fp32."""
    causal, lengths = CASES[case]
    sizes = (TOKENS, HEADS, 16, lengths, causal)
    with simulated_gpu():
        inputs, reads, simulated = make_inputs(*sizes, dtype=torch.float32, device="cuda")
        forward, backward, read = generate(inputs, reads, CHIPS["sm_90"])
    inputs, reads, tensors = make_inputs(*sizes)
    places = [next(i for i, x in enumerate(simulated) if x is tensor) for tensor in read]
    # with the strides of the output, which are those of the query
    weight = torch.randn(TOKENS, 2, HEADS, 16, generator=torch.Generator().manual_seed(1))
    weight = weight.permute(1, 2, 0, 3)
    with (
        mock.patch.object(torch.cuda, "_DeviceGuard", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "set_device"),
        torch.no_grad(),
    ):
        out, *kept = program(forward)["call"]([tensors[place].detach() for place in places])
        gradients = program(backward)["call"]([*kept, weight])
    leaves = [*inputs, kernel_of(reads).bias]
    expected = written_out(leaves, causal, lengths)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    found = {place: gradients[i] for i, place in enumerate(places)}
    differences = [(out - expected).abs().max().item()]
    differences += [(found[i] - wanted[i]).abs().max().item() for i in range(4)]
    return dict(zip(("output", "query", "key", "value", "bias"), differences, strict=True))


def written_out(
    leaves: list[torch.Tensor], causal: bool, lengths: list[int] | None
) -> torch.Tensor:
    """Return softmax(QK^T + bias) V for the masks of a case."""
    query, key, value, bias = leaves
    at = torch.arange(TOKENS)
    distance = at[None, :] - at[:, None]
    scores = query @ key.transpose(2, 3) + bias[:, distance + TOKENS - 1]
    if causal:
        scores = scores.masked_fill(distance > 0, -math.inf)
    if lengths is not None:
        padding = at >= torch.tensor(lengths)[:, None]
        scores = scores.masked_fill(padding[:, None, None, :], -math.inf)
    return scores.softmax(-1) @ value


def compile_for(chip: str) -> list[dict[str, Any]]:
    """Return the name, shared memory in bytes and spilled registers of each kernel of mT5-XL."""
    target, found = CHIPS[chip], []
    for causal, tokens, lengths in ((False, 1024, [1024, 1000]), (True, 232, None)):
        with simulated_gpu():
            inputs, reads, _ = make_inputs(
                tokens, 32, 64, lengths, causal, dtype=torch.bfloat16, device="cuda"
            )
            programs = generate(inputs, reads, target)[:2]
        for code in programs:
            kernels = [x for x in program(code).values() if isinstance(x, Kernel)]
            for kernel in kernels:
                if kernel.kind == "template":
                    compiled = kernel.compile(target)
                    found.append(
                        {
                            "kernel": compiled.metadata.name,
                            "warps": compiled.metadata.num_warps,
                            "shared": compiled.metadata.shared,
                            "spilled": _spilled(chip, compiled.asm),
                            "atomic": bool(
                                re.search(r"\bred\.|\batom\.|_atomic_", _text(compiled.asm))
                            ),
                        }
                    )
        torch.compiler.reset()
    return found


def _text(asm: dict[str, Any]) -> str:
    text: str = asm["ptx"] if "ptx" in asm else asm["amdgcn"]
    return text


def _spilled(chip: str, asm: dict[str, Any]) -> int:
    """Return bytes (NVIDIA) or registers (AMD) that are spilled to memory."""
    if "amdgcn" in asm:
        return sum(map(int, re.findall(r"gpr_spill_count: *(\d+)", asm["amdgcn"])))
    from triton.backends.nvidia.compiler import get_ptxas

    arch = re.findall(r"\.target (\w+)", asm["ptx"])[0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(asm["ptx"])
        command = [get_ptxas(CHIPS[chip].arch).path, "-v", f"--gpu-name={arch}", file]
        done = subprocess.run(
            [*command, "-o", file.with_suffix(".cubin")], capture_output=True, text=True, check=True
        )
    return sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))


if __name__ == "__main__":
    command, argument = sys.argv[1:]
    result = {"compare": compare, "compile": compile_for}[command](argument)
    sys.stdout.write(json.dumps(result) + "\n")
