"""`Checkpoints` restores the whole module, and refuses or names what does not fit to it."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from frontier_llm.checkpoint.discovery import newest
from frontier_llm.checkpoint.folders import MANIFEST
from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.checkpoint.torch_dcp import Writer
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.world import World
from frontier_llm.library import Checkpoints, Precision, Sharded, shard
from tests.covering import covering
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

WIDTH, RATE, STEP = 12, 1e-2, 3


class Net(nn.Module):
    """Layers of a width, of which `frozen` ones do not train, and a buffer of a shape."""

    def __init__(
        self,
        layers: int = 3,
        frozen: tuple[int, ...] = (),
        buffer: tuple[int, ...] = (),
        width: int = WIDTH,
        seed: int = 1,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width).requires_grad_(not frozen)
        for index in frozen:
            self.layers[index].requires_grad_(False)
        if buffer:
            self.register_buffer("mean", torch.full(buffer, float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.norm(x).square().mean()
        return out


FROZEN = partial(Net, frozen=(0, 1), buffer=(3,))


def saved(world: World, folder: Path, make: Callable[[], Net], settings: dict[str, Any]) -> Any:
    """Train a step, save it, and return the state dict then."""
    states = shard(make(), **settings)
    states.backward(states.module(torch.ones(2, states.module.norm.normalized_shape[0])))
    states.step(RATE, saved=True)
    checkpoints = Checkpoints(folder, states)
    checkpoints.save(STEP)
    checkpoints.close()
    return states.state_dict()


def restored(
    world: World, folder: Path, make: Callable[..., Net], settings: dict[str, Any]
) -> tuple[str, Any, list[str]]:
    """Restore into a module with other values; return the error, the state dict and warnings."""
    states, found, error = shard(make(seed=2), **settings), list[str](), ""
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("frontier_llm").addHandler(handler)
    try:
        assert Checkpoints(folder, states).restore() == STEP
    except CheckpointError as failure:
        error = str(failure)
    return error, states.state_dict() if not error else None, found


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    "precision", [pytest.param(None, marks=pytest.mark.exhaustive), Precision(torch.bfloat16)]
)
def test_frozen_parameters_come_back_on_any_number_of_ranks(
    tmp_path: Path, precision: Precision | None
) -> None:
    layouts = [(4, {"params": 2}), (4, {"params": 1, "optimizer": 2}), (1, {}), (2, {"params": 2})]
    for number, (ranks, layout) in enumerate(layouts):
        folder, settings = tmp_path / str(number), {**layout, "precision": precision}
        want = run_ranks(saved, ranks, folder, FROZEN, settings)[0]
        checkpoint = newest(folder)
        assert checkpoint is not None
        shapes = {name: tensor.shape for name, tensor in checkpoint.manifest.weights.items()}
        assert shapes == {n: tuple(v.shape) for n, v in want.items() if n != "mean"}
        others, other = layouts[number - 1]
        now = {**other, "precision": precision}
        for error, got, warnings in run_ranks(restored, others, folder, FROZEN, now):
            assert error == ""
            assert same(got, want)
            assert warnings == []


OTHERS: dict[str, tuple[Callable[..., Net], Callable[..., Net], str]] = {
    "fewer layers": (Net, partial(Net, 2), "layers.2.bias and 1 more is stored"),
    "more layers": (partial(Net, 2), Net, "layers.2.weight is absent"),
    "fewer frozen": (FROZEN, partial(Net, 2, (0, 1), (3,)), "layers.2.bias and 1 more is stored"),
    "more frozen": (partial(Net, 2), partial(Net, 3, (2,)), "layers.2.weight is absent"),
    "wider": (Net, partial(Net, width=14), "is of shape [12"),
    "no buffer": (partial(Net, buffer=(3,)), Net, "buffer:mean, torch.float32 [3] is stored"),
    "a buffer": (Net, partial(Net, buffer=(3,)), "buffer:mean is absent"),
    "long buffer": (partial(Net, buffer=(3,)), partial(Net, buffer=(5,)), "mean, torch.float32 [3"),
    "buffer": (partial(Net, buffer=(6,)), partial(Net, buffer=(2, 3)), "mean, torch.float32 [6]"),
    "trained": (FROZEN, partial(Net, buffer=(3,)), "no state exp_avg, only master; was it frozen"),
}  # fmt: skip


@pytest.mark.parametrize("case", covering(OTHERS, ["long buffer", "more frozen", "buffer"]))
def test_checkpoints_of_other_modules_are_refused_on_all_ranks(tmp_path: Path, case: str) -> None:
    first, second, text = OTHERS[case]
    run_ranks(saved, 2, tmp_path, first, {})
    for error, _, _ in run_ranks(restored, 2, tmp_path, second, {"params": 2}):
        assert text in error


def begun_with_weights(world: World, folder: Path) -> tuple[Any, str]:
    """Do what the error says for a layer that was frozen when it was saved, and train a step."""
    module = Net(seed=2, buffer=(3,))
    said, _, _ = restored(world, folder, partial(Net, buffer=(3,)), {})
    exec(said.partition("before shard(): ")[2], {"torch": torch, "module": module})
    read = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    states = shard(module)
    states.backward(states.module(torch.ones(2, WIDTH)))
    states.step(RATE)
    return read, said


def test_frozen_layers_may_train_after_their_weights_are_read(tmp_path: Path) -> None:
    want = run_ranks(saved, 2, tmp_path, FROZEN, {})[0]
    for read, said in run_ranks(begun_with_weights, 2, tmp_path):
        assert "freeze it" in said
        assert same(read, {name: value for name, value in want.items() if name != "mean"})


def test_parameters_that_are_frozen_now_get_their_weights(tmp_path: Path) -> None:
    want = run_ranks(saved, 2, tmp_path, partial(Net, buffer=(3,)), {})[0]
    for error, got, _ in run_ranks(restored, 2, tmp_path, FROZEN, {}):
        assert error == ""
        assert same(got, want)


def test_older_checkpoints_leave_out_what_a_warning_counts(tmp_path: Path) -> None:
    want = run_ranks(saved, 2, tmp_path, FROZEN, {})[0]
    path = tmp_path / f"step_{STEP:08d}" / MANIFEST
    manifest = Manifest.load(path.parent)
    tensors = {n: t for n, t in manifest.tensors.items() if n.startswith("layers.2")}
    meta = {key: value for key, value in manifest.meta.items() if key != "buffers"}
    path.write_bytes(manifest.model_copy(update={"tensors": tensors, "meta": meta}).to_bytes())
    (error, got, warnings), (_, _, others) = run_ranks(restored, 2, tmp_path, FROZEN, {})
    assert error == ""
    assert torch.equal(got["layers.2.weight"], want["layers.2.weight"])
    assert torch.equal(got["layers.0.weight"], FROZEN(seed=2).layers[0].weight)
    assert len(warnings) == 1
    assert "7 frozen parameters or buffers are not restored from it, first" in warnings[0]
    assert others == []


def test_a_damaged_list_of_buffers_is_named_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(saved, 2, tmp_path, FROZEN, {})
    path = tmp_path / f"step_{STEP:08d}" / MANIFEST
    manifest = Manifest.load(path.parent)
    meta = {**manifest.meta, "buffers": 3}
    path.write_bytes(manifest.model_copy(update={"meta": meta}).to_bytes())
    for error, _, _ in run_ranks(restored, 2, tmp_path, FROZEN, {}):
        assert "is damaged at meta.buffers: 3" in error


def save_with_fsdp(world: World, folder: Path) -> dict[str, torch.Tensor]:
    module = FROZEN()
    adamw = torch.optim.AdamW(p for p in module.parameters() if p.requires_grad)
    module(torch.ones(2, WIDTH)).backward()
    adamw.step()
    weights, states = get_state_dict(module, adamw)
    dcp.save({"model": weights, "optim": states}, storage_writer=Writer(folder, STEP))
    return module.state_dict()


def test_frozen_parameters_of_torch_come_back_and_buffers_are_named(tmp_path: Path) -> None:
    want = run_ranks(save_with_fsdp, 1, tmp_path)[0]
    ((error, got, warnings),) = run_ranks(restored, 1, tmp_path, FROZEN, {})
    assert error == ""
    assert same(got, want | {"mean": torch.full((3,), 2.0)})
    assert len(warnings) == 1
    assert "1 frozen parameters or buffers are not restored" in warnings[0]
    assert warnings[0].endswith("first buffer:mean")


def test_damage_that_one_rank_reads_ends_all_ranks(tmp_path: Path) -> None:
    run_ranks(saved, 2, tmp_path, Net, {})
    path = tmp_path / f"step_{STEP:08d}" / "rank_00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for error, _, _ in run_ranks(restored, 2, tmp_path, Net, {}):
        assert path.name in error


def write_in_place(states: Sharded, shapes: dict[str, torch.Size]) -> None:
    with states.gathered(), torch.no_grad():
        for parameter in states.module.parameters():
            parameter.zero_()


def load_zeros(states: Sharded, shapes: dict[str, torch.Size]) -> None:
    zero = torch.zeros(())
    states.module.load_state_dict({name: zero.expand(shape) for name, shape in shapes.items()})


def write_while_saving(world: World, folder: Path, write: Callable[..., None]) -> list[bool]:
    """Write to the parameters after `save`; return which of them have their old values on disk."""
    torch.manual_seed(1)
    states = shard(nn.Sequential(*(nn.Linear(800, 800) for _ in range(12))))
    want = {name: value.clone() for name, value in states.named_parameters()}
    checkpoints = Checkpoints(folder, states)
    shapes = {name: value.shape for name, value in want.items()}
    checkpoints.save(STEP)
    write(states, shapes)
    checkpoints.close()
    checkpoints.restore()
    return [torch.equal(value, want[name]) for name, value in states.named_parameters()]


@pytest.mark.parametrize("write", [write_in_place, load_zeros])
def test_writes_after_saving_are_not_in_the_checkpoint(
    tmp_path: Path, write: Callable[..., None]
) -> None:
    assert all(run_ranks(write_while_saving, 1, tmp_path, write)[0])
