"""Triton's kernels are compiled ahead of time, for the GPUs of the clusters, without a GPU.

The bits of the kernels are compared in tests/collectives/test_blockwise.py. Here the machine code
is examined for what the interpreter cannot show: products and sums that were fused, registers that
were spilled to memory, shared memory, and the width of loads and stores.
"""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

pytestmark = pytest.mark.slow
triton = pytest.importorskip("triton")

from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from frontier_llm.collectives import triton_blockwise as kernels
from frontier_llm.collectives.residual import Residual
from frontier_llm.geometry.formats import Format

INT8, INT4 = Format("int8", 256, 4), Format("int4", 256, 2)
ROUNDED = Format("int4", 256, 2, is_stochastic=True)
LONG, UNEVEN = Format("int8", 8192, 2), Format("int4", 160, 2, is_stochastic=True)
ROTATED, ROTATED_ROUNDED = (
    replace(INT4, rotation_elements=64),
    replace(ROUNDED, rotation_elements=256),
)
ROTATED_LONG = replace(LONG, rotation_elements=1024)
"""Formats; if rounding is stochastic, errors are kept, and differences are sent. If blocks are also
rotated, the errors are kept in int8."""
CPU = torch.device("cpu")
VALUES = ("*fp32", "*bf16", "*fp16")
NVIDIA = {"sm_80": 80, "sm_90a": 90}
AMD = ("gfx90a", "gfx942")
DIVISION = {"v_fma_f32": 3, "v_fmac_f32": 2}
"""Fused operations in AMD's code of one correctly rounded division."""
SHARED_BYTES = 8192
"""With so much, the threads that a multiprocessor can hold have enough of its at least 64 KiB."""
SLOTS = {"slots": "*u8", "slot_bytes": "i32", "elements": "i32", "border": "i32"}


def _quantise(values, fmt):
    base, residual = values, None
    if fmt.is_stochastic:
        block_elements = fmt.block_elements if fmt.rotation_elements else None
        base, residual = "*bf16", Residual.zeros(1, 1, CPU, block_elements, decay=0.5)
    kept = {None: (values, values), 16: ("*bf16", "*bf16"), 8: ("*i8", "*fp32")}
    bits = None if residual is None else 8 * residual.values.element_size()
    types = dict(zip(("residual", "residual_scales"), kept[bits], strict=True))
    types = {"values": values, "base": base, **types, **SLOTS, "skip": "i32", "seed": "i32"}
    constants = {
        "largest": fmt.largest,
        "inverse": 1 / fmt.largest,
        "stochastic": fmt.is_stochastic,
        "difference": fmt.is_stochastic,
        **kernels.residual_constants(residual),
    }
    return kernels._quantise, types, fmt, constants


def _dequantise(out, fmt):
    return kernels._dequantise, {"out": out, **SLOTS}, fmt, {"add": fmt.is_stochastic}


def _add_up(fmt):
    return kernels._add_up, {"total": "*fp32", **SLOTS, "skip": "i32", "ranks": "i32"}, fmt, {}


VARIANTS = [
    *(_quantise(values, fmt) for values, fmt in product(VALUES, (INT8, INT4, ROUNDED))),
    *(_dequantise(out, fmt) for out, fmt in product(VALUES, (INT8, INT4))),
    *(_add_up(fmt) for fmt in (INT8, INT4, ROTATED)),
    *(make("*bf16", fmt) for make in (_quantise, _dequantise) for fmt in (LONG, UNEVEN)),
    *(_quantise("*bf16", fmt) for fmt in (ROTATED_ROUNDED, ROTATED_LONG)),
    _dequantise("*bf16", ROTATED_ROUNDED),
]
"""Of the kernels: a function, the types of its arguments, the format, its other constants."""


def compile_for(target, variant, *, aligned=True, **options):
    """Return Triton's compiled kernel, with the options that the product launches it with.

    `aligned`: the elements of a part and the border are multiples of 16. Addresses always are.
    """
    function, types, fmt, constants = variant
    scales = tl.float32 if fmt.scale_bytes == 4 else tl.bfloat16
    constants = {
        **kernels.block_constants(fmt), "scale_type": scales, "small_type": tl.bfloat16, **constants
    }  # fmt: skip
    assert set(function.arg_names) == set(types) | set(constants)
    unaligned = {"skip", "seed", "ranks"} | (set() if aligned else {"elements", "border"})
    divisible = [(i,) for i, name in enumerate(function.arg_names)
                 if name in types and name not in unaligned]  # fmt: skip
    source = ASTSource(
        fn=function,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={key: [["tt.divisibility", 16]] for key in divisible},
    )
    return triton.compile(source, target=target, options={**kernels.LAUNCH_OPTIONS, **options})


def name_of(variant):
    function, types, fmt, _ = variant
    return f"{function.__name__} {types} {fmt}"


def count_wide(ptx):
    """Return how many instructions access 16 bytes of global memory."""
    return len(re.findall(r"\b(?:ld|st)\.global\S*\.v4\.b32", ptx))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Compile anew, and not what an earlier run left in the user's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("chip", AMD)
def test_code_for_amd_fuses_and_spills_nothing(chip):
    for variant in VARIANTS:
        compiled = compile_for(GPUTarget("hip", chip, 64), variant)
        code = compiled.asm["amdgcn"]
        fused = re.findall(r"\b(v_(?:pk_)?(?:fma|fmac|mad|mac)(?:_mix|_legacy)?_f(?:32|16))", code)
        divisions = code.count("v_div_fixup_f32")
        allowed = {name: count * divisions for name, count in DIVISION.items()}
        found = {name: fused.count(name) for name in {*fused, *DIVISION}}
        assert found == allowed, name_of(variant)
        assert re.findall(r"gpr_spill_count: *(\d+)", code) == ["0", "0"], name_of(variant)
        assert compiled.metadata.shared <= SHARED_BYTES, name_of(variant)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chip", NVIDIA)
def test_code_for_nvidia_fuses_and_spills_nothing_and_has_wide_loads(chip, monkeypatch, capfd):
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
    for variant in VARIANTS:
        compiled = compile_for(GPUTarget("cuda", NVIDIA[chip], 32), variant)
        code = compiled.asm["ptx"]
        assert not re.findall(r"\b(?:fma|mad)\.\w*\.?f(?:32|16)", code), name_of(variant)
        accesses = len(re.findall(r"\b(?:ld|st)\.global", code))
        narrow = 3 if variant[3].get("residual_bits") == 8 else 1  # two of scales of residuals
        assert count_wide(code) == accesses - narrow, f"{name_of(variant)}: only scales are narrow"
        spilled = re.findall(r"(\d+) bytes spill", capfd.readouterr().out)
        assert spilled == ["0", "0"], name_of(variant)
        assert compiled.metadata.shared <= SHARED_BYTES, name_of(variant)


def test_unaligned_parts_are_not_accessed_in_16_bytes():
    """Such addresses are no multiples of 16, at which a GPU would stop with an error."""
    target = GPUTarget("cuda", 80, 32)
    for variant in (_quantise("*bf16", INT8), _dequantise("*bf16", INT8)):
        wide = [count_wide(compile_for(target, variant, aligned=one).asm["ptx"])
                for one in (True, False)]  # fmt: skip
        assert wide[1] < wide[0] / 2, name_of(variant)


def test_a_fused_product_is_found():
    """The same kernel with fusion allowed, so that the two tests above can fail."""
    with_errors = _quantise("*fp32", ROUNDED)
    code = compile_for(GPUTarget("cuda", 80, 32), with_errors, enable_fp_fusion=True).asm["ptx"]
    assert re.findall(r"\bfma\.\w*\.?f32", code)
