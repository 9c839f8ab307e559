"""Moments in 8 bits: close to the values, and the same codes when they are encoded again."""

import pytest
import torch

from frontier_llm.collectives.block_codes import BlockCodes, EncodedPart, table
from tests.ranks import run_ranks
from tests.trainer.test_parity import BATCH, MODELS, train_and_collect
from tests.values import tiny_values

CPU = torch.device("cpu")


def values(elements: int, *, signed: bool) -> torch.Tensor:
    """Return numbers of many magnitudes, and a block of zeros."""
    generator = torch.Generator().manual_seed(7)
    numbers = torch.randn(elements, generator=generator)
    numbers *= 10 ** (4 * torch.rand(elements, generator=generator) - 8)
    numbers[256:512] = 0
    return numbers if signed else numbers.square()


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_has_different_numbers_up_to_one(*, signed: bool) -> None:
    numbers = table(CPU, signed=signed)
    assert len(numbers) == 256
    assert len(numbers.unique()) >= 254
    assert numbers.max() == 1
    assert (numbers == 0).any()
    assert bool(numbers.min() < 0) is signed


@pytest.mark.parametrize("signed", [True, False])
def test_errors_are_small_and_codes_stay(*, signed: bool) -> None:
    exact = values(1000, signed=signed)
    codes = BlockCodes(1000, CPU, signed=signed)
    codes.encode(exact)
    decoded = codes.decode()
    blocks = torch.nn.functional.pad(exact, (0, 24)).view(-1, 256)
    scales = blocks.abs().amax(dim=1).repeat_interleave(256)[:1000]
    # half of the largest step of the table, and half of the steps in which it is looked up
    limit = scales * ((0.9 / 64 if signed else 0.9 / 128) + 2**-8) / 2
    assert ((decoded - exact).abs() <= limit).all()
    assert (decoded[256:512] == 0).all()
    if not signed:
        assert (decoded[exact > 0] > 0).all()
    first = codes.codes.clone()
    codes.encode(decoded)
    assert codes.codes.equal(first)
    assert codes.decode().equal(decoded)


def test_parts_and_what_is_staged() -> None:
    exact = values(1000, signed=True)
    codes = BlockCodes(1000, CPU, signed=True)
    codes.encode(exact)
    part = EncodedPart(codes, 100, 900)[50:300]
    assert part.numel() == 250
    assert part.decode().equal(codes.decode()[150:400])
    codes.staged()[600:610] = 5.0
    codes.commit()
    assert (codes.decode()[600:610] == 5).all()


@pytest.mark.slow
def test_losses_are_near_those_of_fp32_moments() -> None:
    losses = {}
    for name in ("adamw", "adamw_8bit"):
        keys = tiny_values(*MODELS["tied_gelu"], *BATCH, f"optimizer.name={name}")
        losses[name], _, _ = run_ranks(train_and_collect, 1, keys, "fp32", 12)[0]
    assert losses["adamw_8bit"] != losses["adamw"]
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], rel=2e-3)
