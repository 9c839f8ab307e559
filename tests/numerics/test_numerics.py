"""Kernels are within bounds that follow from rounding, and a wrong kernel is named."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from frontier_lab.numerics.compare import checks, compare_on_all_ranks, explain
from frontier_lab.numerics.subject import Check
from frontier_llm.cli.compose import compose
from frontier_llm.config import decode
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import FrontierError
from frontier_llm.parallel import megatron_cpu
from tests.covering import covering
from tests.ranks import run_ranks

SMALL = (
    "model.hidden=64", "model.heads=4", "model.head_dim=16", "model.ffn=96", "model.vocabulary=200",
    "data.sequence_length=72", "data.micro_batch=2",
)  # fmt: skip
GROUPED = (*SMALL, "model.kv_heads=2")
MODELS = {
    "gpt": ("model=gpt_tiny", *SMALL, "optimizer=adamw"),
    "llama": (
        "model=llama_7b", *GROUPED, "optimizer=muon", "collectives=four_bits", "model.window=20",
        "model.window_every=2", "data.documents=separate", "model.rotary_scaling=yarn",
        "model.rotary_original_length=32", "model.rotary_factor=4",
    ),
    "qwen3": (
        "model=qwen3_0_6b", *GROUPED, "optimizer=adamw_8bit", "collectives=zeropp",
        "collectives.rounding=stochastic", "model.attention_softcap=20", "model.logit_softcap=15",
        "optimizer.z_loss=1e-3",
    ),
    "gemma3": (
        "model=gemma3_4b", *GROUPED, "optimizer=adamw", "model.window=20", "model.score_width=24",
    ),
    "mt5": ("model=mt5_tiny", *SMALL, "optimizer=adafactor"),
    "rotary_mt5": (
        "model=mt5_tiny", *GROUPED, "optimizer=adamw", "model.positions=rotary", "model.window=20",
        "model.attention_softcap=20", "model.qk_norm=head", "model.tied=true",
    ),
    "t5gemma": (
        "model=t5gemma_9b_2b", "data=stdlib_spans", *GROUPED, "optimizer=adamw", "model.window=20",
        "model.encoder_window=21", "model.encoder_hidden=96", "model.encoder_heads=6",
        "model.encoder_kv_heads=3", "model.encoder_head_dim=24", "model.encoder_ffn=160",
    ),
    "t5gemma2": (
        "model=t5gemma2_4b_4b", "data=stdlib_spans", *GROUPED, "optimizer=adamw", "model.window=20",
        "model.encoder_window=10", "model.encoder_window_after=11",
    ),
}  # fmt: skip


def checks_of(overrides: tuple[str, ...], precision: str, seed: int = 1) -> list[Check]:
    config = decode(compose([*overrides]))
    accelerator = Accelerator.of_rank(0)
    megatron_cpu.install()
    torch.set_num_threads(1)
    return list(checks(config, accelerator, precision, seed))


def _wrong(results: list[Check]) -> list[tuple[str, str]]:
    return [(check.kernel, check.worst) for check in results if not check.is_right]


IN_BOTH = [(model, precision) for model in MODELS for precision in ("fp32", "bf16")]
COVERED = [case for place, case in enumerate(IN_BOTH) if place % 4 in (1, 2)]
"""Every other model always runs in fp32, and the others in bf16."""


@pytest.mark.parametrize("case", covering(IN_BOTH, COVERED), ids="-".join)
def test_all_kernels_are_within_their_bounds(case):
    model, precision = case
    results = checks_of(MODELS[model], precision)
    assert _wrong(results) == []
    # a bound of a kernel in fp32 is far below the errors that matter
    if precision == "fp32":
        kinds = ("norm", "linear", "attention", "activation", "loss", "queries", "sum of")
        assert all(c.bound < 1e-4 for c in results if c.kernel.startswith(kinds))


Fault = Callable[[ExitStack], None]


def _patch(target: str, make: Callable[[Any], Any]) -> Fault:
    """Return a fault that replaces what `target` names by `make(original)`."""

    def inject(stack: ExitStack) -> None:
        module, _, name = target.rpartition(".")
        original = getattr(_module(module), name)
        stack.enter_context(mock.patch(target, make(original)))

    return inject


def _module(path: str) -> Any:
    try:
        return __import__(path, fromlist=["_"])
    except ImportError:  # the last part is a class
        module, _, name = path.rpartition(".")
        return getattr(__import__(module, fromlist=["_"]), name)


def _transposed(original):
    def accumulate(total, left, right, *, add):
        product = torch.zeros_like(total)
        original(product, left, right, add=False)
        square = product.T if product.shape[0] == product.shape[1] else product
        total.copy_(total + square if add else square)

    return accumulate


def _in_bf16(original):
    def accumulate(total, left, right, *, add):
        product = torch.zeros_like(total)
        original(product, left, right, add=False)
        total.copy_((total.bfloat16() + product.bfloat16()).float() if add else product)

    return accumulate


def _twice(original):
    def add(self, index, gradient):
        original(self, index, gradient)
        original(self, index, gradient)

    return add


def _with_mask(change: Callable[[torch.Tensor], torch.Tensor]):
    """Return a fault of causal attention whose mask is changed."""

    def make(original):
        def attend(query, key, value, is_causal=False, **options):
            if not is_causal:
                return original(query, key, value, **options)
            mask = change(torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril())
            options["attn_mask"] = mask
            return original(query, key, value, **options)

        return attend

    return make


def _row_reads_all(mask):
    mask[41] = True
    return mask


def _one_key_more(mask):
    return torch.ones_like(mask).tril(1)


def _block_row_reads_all(original):
    def bias(table, queries, keys, reads, mask):
        result = original(table, queries, keys, reads, mask)
        return result.nan_to_num(neginf=0.0) if reads.after == 1 else result

    return bias


def _first_head_only(original):
    def repeat(query, key, value, *, masked):
        value = value.clone()
        value[:, -1] = value[:, 0]
        return original(query, key, value, masked=masked)

    return repeat


def _floor(original):
    return lambda rows, scale, *rest: (rows / scale[:, None]).nan_to_num(0.0).floor()


def _truncating(original):
    def write(self):
        for master, parameters in zip(self.masters, self._parameters, strict=True):
            if master is not parameters:
                bits = master.view(torch.int32) >> 16 << 16
                parameters.copy_(bits.view(torch.float32))

    return write


def _other_scale(original):
    def init(self, *arguments, **options):
        original(self, *arguments, **options)
        self.scores = self.scores.__class__(scale=0.2)

    return init


def _eager_epsilon(factor):
    return lambda original: (
        lambda x, weight, *rest: original(x, weight, *rest[:-1], rest[-1] * factor)
    )


def _sum_in_bf16(original):
    def rms_norm(x, weight, epsilon):
        total = torch.zeros(x.shape[:-1], dtype=torch.bfloat16)
        for column in x.unbind(-1):
            total = total + column.square().bfloat16()
        mean = total.float() / x.shape[-1]
        return (weight * (x * (mean + epsilon).rsqrt()[..., None])).to(x.dtype)

    return rms_norm


ACCUMULATE = "frontier_llm.sharding.unit_gradients.accumulate_product"
SDPA = "frontier_llm.model.attention.scaled_dot_product_attention"
RMS = "frontier_llm.device.kernels.torch_rms_norm"
FAULTS: dict[str, tuple[Fault, str, str, str]] = {
    # name: (fault, model, precision, kernel)
    "transposed gradient": (_patch(ACCUMULATE, _transposed), "gpt", "fp32", "linear product"),
    "wrong epsilon": (
        _patch("frontier_llm.device.kernels.torch_layer_norm", _eager_epsilon(1.2)),
        "gpt", "bf16", "norm (decoder, attention)",
    ),
    "wrong epsilon of heads": (
        _patch("frontier_llm.model.rotary.HeadNorms.__init__",
               lambda original: lambda self, config, *rest: (
                   original(self, config, *rest), setattr(self, "epsilon", 1e-5))[0]),
        "qwen3", "bf16", "norms of queries and keys",
    ),
    "missing mask row": (_patch(SDPA, _with_mask(_row_reads_all)), "gpt", "bf16", "attention"),
    "missing mask row of relative positions": (
        _patch("frontier_llm.model.attention.block_bias", _block_row_reads_all),
        "mt5", "bf16", "attention (decoder)",
    ),
    "bf16 sum of gradients": (_patch(ACCUMULATE, _in_bf16), "gpt", "fp32", "linear product"),
    "bf16 sum of products": (
        _patch("frontier_llm.device.accumulate.accumulate_product", _in_bf16),
        "gpt", "bf16", "sum of products",
    ),
    "bf16 sum of a norm": (_patch(RMS, _sum_in_bf16), "mt5", "fp32", "norm (encoder, attention)"),
    "wrong rounding of quantisers": (
        _patch("frontier_llm.collectives.torch_blockwise._round", _floor),
        "llama", "fp32", "quantiser (int4, nearest)",
    ),
    "wrong rounding of parameters": (
        _patch("frontier_llm.sharding.optimizer_states.Optimizer.write_parameters", _truncating),
        "gpt", "bf16", "cast of master weights",
    ),
    "wrong softmax scale": (
        _patch("frontier_llm.model.attention.SdpaAttention.__init__", _other_scale),
        "gpt", "bf16", "attention",
    ),
    "wrong base of rotary positions": (
        _patch("frontier_llm.model.rotary.stretched",
               lambda original: lambda f, model: original(f, model) ** 1.02),
        "llama", "fp32", "queries and keys",
    ),
    "dropped head of keys": (
        _patch("frontier_llm.model.attention.repeat_heads", _first_head_only),
        "llama", "bf16", "attention",
    ),
    "causal mask off by one": (
        _patch(SDPA, _with_mask(_one_key_more)), "llama", "bf16", "attention",
    ),
    "gradient added twice": (
        _patch("frontier_llm.sharding.unit_gradients.UnitGradients.add", _twice),
        "gpt", "bf16", "sums of gradients",
    ),
    "wrong bound of scores": (
        _patch("frontier_llm.model.layer.Scores",
               lambda original: lambda scale, cap, *rest, **more: (
                   original(scale, 1.2 * cap, *rest, **more))),
        "qwen3", "bf16", "attention",
    ),
    "wrong activation": (
        _patch("frontier_llm.model.transformer.F.silu",
               lambda original: lambda x: original(1.02 * x)),
        "llama", "bf16", "activation",
    ),
    "wrong chance of stochastic rounding": (
        _patch("frontier_llm.collectives.torch_blockwise.uniform",
               lambda original: lambda *arguments: 0.9 * original(*arguments)),
        "qwen3", "fp32", "quantiser (int8, stochastic)",
    ),
    "epsilon of the optimizer": (
        _patch("frontier_llm.sharding.update_groups.adamw",
               lambda original: lambda *a, eps, **k: original(*a, eps=1.5 * eps, **k)),
        "gpt", "fp32", "optimizer (adamw, update 1)",
    ),
}  # fmt: skip


ALIKE = (
    "bf16 sum of a norm", "wrong epsilon of heads", "dropped head of keys", "missing mask row",
    "wrong bound of scores", "bf16 sum of gradients", "wrong base of rotary positions",
    "missing mask row of relative positions", "wrong activation",
)  # fmt: skip
"""Faults of which a similar one always runs: of the same kernel, or of the same kind."""


@pytest.mark.parametrize("fault", covering(FAULTS, ALIKE))
def test_a_wrong_kernel_is_named(fault):
    inject, model, precision, kernel = FAULTS[fault]
    with ExitStack() as stack:
        inject(stack)
        wrong = [check for check in checks_of(MODELS[model], precision) if not check.is_right]
    assert wrong
    assert wrong[0].kernel.startswith(kernel)
    message = explain(wrong[0], decode(compose([])))
    assert f"'{wrong[0].kernel}'" in message
    assert "Do: " in message


def _compare(world, folder):
    dist.destroy_process_group()
    world = dataclasses.replace(world, host=f"node{world.rank}")
    store = dist.FileStore(f"{folder}/store", world.size)
    config = decode(compose([*MODELS["gpt"]]))
    megatron_cpu.install()
    lines: list[str] = []
    with ExitStack() as stack:
        if world.rank == 1:
            _patch(SDPA, _with_mask(_row_reads_all))(stack)
        try:
            compare_on_all_ranks(config, world, store, Accelerator.of_rank(0), "bf16", lines.append)
        except FrontierError as error:
            return type(error).__name__, str(error), lines
    return "", "", lines


def test_the_error_names_the_rank_and_its_host(tmp_path):
    first, second = run_ranks(_compare, 2, tmp_path)
    kind, message, table = first
    assert kind == "NumericsError"
    assert message.startswith("rank 1 on node1: the kernel 'attention (causal)' (flash, bf16)")
    assert "rank 0" not in message
    assert second[0] == "RankFailure"
    assert [line.split()[-1] for line in table if "WRONG" in line] == []
    assert sum("ok" in line for line in table) == len(table) - 1 > 15
