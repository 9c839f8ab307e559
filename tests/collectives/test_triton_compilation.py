"""Triton's kernels are compiled ahead of time, for the GPUs of the clusters, without a GPU.

The bits of the kernels are compared in tests/collectives/test_blockwise.py. Here the machine code
is examined for what the interpreter cannot show: products and sums that were fused, registers that
were spilled to memory, and shared memory.
"""

import re
import subprocess
from itertools import product

import pytest

pytestmark = pytest.mark.slow
triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from frontier_llm.collectives import triton_blockwise as kernels

BLOCK = 256
VALUES = ("*fp32", "*bf16", "*fp16")
NVIDIA = {"sm_80": 80, "sm_90a": 90}
AMD = ("gfx90a", "gfx942")
DIVISION = {"v_fma_f32": 3, "v_fmac_f32": 2}
"""Fused operations in AMD's code of one correctly rounded division."""


FORMATS = {"int8": (8, "*fp32", False), "int4": (4, "*bf16", False), "rounded": (4, "*bf16", True)}
"""Bits, dtype of the scales, and whether rounding is stochastic and errors are kept."""


def _quantise():
    for values, (bits, scales, rounded) in product(VALUES, FORMATS.values()):
        largest = 127 if bits == 8 else 7
        types = {
            "values": values,
            "residual": "*bf16" if rounded else values,
            "scales": scales,
            "packed": "*i8",
            "elements": "i32",
            "seed": "i32",
        }
        constants = {
            "bits": bits,
            "largest": largest,
            "inverse": 1 / largest,
            "bf16_scales": scales == "*bf16",
            "stochastic": rounded,
            "feedback": rounded,
        }
        yield kernels._quantise, types, constants


def _dequantise():
    for out, (bits, scales) in product(VALUES, ((8, "*fp32"), (4, "*bf16"))):
        types = {"scales": scales, "packed": "*i8", "out": out, "elements": "i32"}
        yield kernels._dequantise, types, {"bits": bits}


def _add_up():
    for bits, scales in ((8, "*fp32"), (4, "*bf16")):
        types = {
            "scales": scales,
            "scales_stride": "i64",
            "packed": "*i8",
            "packed_stride": "i64",
            "total": "*fp32",
            "ranks": "i32",
            "skip": "i32",
            "elements": "i32",
        }
        yield kernels._add_up, types, {"bits": bits}


VARIANTS = [*_quantise(), *_dequantise(), *_add_up()]


def compile_for(target, variant, **options):
    """Return Triton's compiled kernel, with the options that the product launches it with."""
    function, types, constants = variant
    constants = {"block": BLOCK, "half": BLOCK // 2, **constants}
    assert set(function.arg_names) == set(types) | set(constants)
    source = ASTSource(
        fn=function,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    return triton.compile(source, target=target, options={**kernels.LAUNCH_OPTIONS, **options})


def name_of(variant):
    function, types, constants = variant
    return f"{function.__name__} {types} {constants}"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Compile anew, and not what an earlier run left in the user's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


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
        assert compiled.metadata.shared <= 4096, name_of(variant)


@pytest.mark.parametrize("chip", NVIDIA)
def test_code_for_nvidia_fuses_and_spills_nothing(chip, tmp_path):
    for variant in VARIANTS:
        compiled = compile_for(GPUTarget("cuda", NVIDIA[chip], 32), variant)
        code = compiled.asm["ptx"]
        assert not re.findall(r"\b(?:fma|mad)\.\w*\.?f(?:32|16)", code), name_of(variant)
        file = tmp_path / "kernel.ptx"
        file.write_text(code)
        done = subprocess.run(
            [
                get_ptxas(NVIDIA[chip]).path,
                "-v",
                f"--gpu-name={chip}",
                file,
                "-o",
                tmp_path / "kernel.cubin",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        spilled = re.findall(r"(\d+) bytes spill", done.stderr)
        assert spilled == ["0", "0"], name_of(variant)
        assert compiled.metadata.shared <= 4096, name_of(variant)


def test_a_fused_product_is_found():
    """The same kernel with fusion allowed, so that the two tests above can fail."""
    adds_up = next(variant for variant in VARIANTS if variant[0] is kernels._add_up)
    code = compile_for(GPUTarget("cuda", 80, 32), adds_up, enable_fp_fusion=True).asm["ptx"]
    assert re.findall(r"\bfma\.\w*\.?f32", code)
