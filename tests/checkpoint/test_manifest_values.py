"""Manifests with wrong values and right digests: each is refused, or gives the same weights."""

import io
import json
import random
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file

from frontier_lab.commands.export_weights import export
from frontier_lab.commands.inspect_checkpoint import show, verify
from frontier_lab.stored_weights import load_weights
from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.folders import MANIFEST
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.checkpoint.writer import Options
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import ParameterRecord, Placement
from tests.checkpoint.crew import PATIENCE, run_crew
from tests.checkpoint.states import MODEL, States, value
from tests.hostile import NAMES, NUMBERS, at, changed, cpu_seconds, leaves, renamed

pytestmark = pytest.mark.forked  # a limit of the processor's time needs the main thread
CHECKED = ("layers.0.ffn.down.weight", "layers.0.ffn.up.bias", "final_norm.weight")
"""Tensors whose entries are changed: split by columns, split by rows, and not split."""


def save(rank: int, size: int, store: Any, folder: Path) -> None:
    states = States(2, 2, rank)
    states.advance(4)
    options = Options(chunk_bytes=4096)
    manager = CheckpointManager(folder, Ranks(rank, size, store, PATIENCE), "blocking", 1, options)
    manager.begin(4, states.shards, {"of": "test"})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    assert not [outcome.error for outcome in run_crew(save, 4, root) if outcome.error]
    return root / "step_00000004"


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def write(folder: Path, content: dict[str, Any]) -> None:
    """Write a manifest with the digest of its content."""
    rest = json.dumps(content, separators=(",", ":")).encode()[1:]
    digest = xxhash.xxh3_128_hexdigest(rest).encode()
    (folder / MANIFEST).write_bytes(b'{"xxh3_128":"%s",%s' % (digest, rest))


def edits(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a description and the content of each changed manifest."""
    paths = [
        path for path in leaves(content)
        if path[0] not in ("files", "tensors") or path[1] in (*CHECKED, "rank_00001.safetensors")
    ]  # fmt: skip
    for path in paths:
        is_text = isinstance(at(content, path), str)
        for new in NAMES if is_text else NUMBERS:
            if path != ("format",):
                yield f"{path} = {new!r}", changed(content, path, new)
    piece = ("tensors", CHECKED[0], "pieces", 0)
    for path in (
        ("files", "rank_00001.safetensors"), ("tensors", CHECKED[0]), ("meta", "of"),
        (*piece, "keys", "master"), (*piece, "bytes_at", "master"),
    ):  # fmt: skip
        for name in NAMES:
            yield f"{path} renamed {name!r}", renamed(content, path, name)
    yield from structural_edits(content)


def structural_edits(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield manifests that lack, repeat or exchange entries."""
    for name in content["files"]:
        others = {key: file for key, file in content["files"].items() if key != name}
        yield f"without {name}", {**content, "files": others}
        chunks = content["files"][name]["chunks"]
        yield (
            f"repeated digest {name}",
            changed(content, ("files", name, "chunks"), [*chunks, chunks[0]]),
        )
    for name, tensor in content["tensors"].items():
        others = {key: other for key, other in content["tensors"].items() if key != name}
        yield f"without {name}", {**content, "tensors": others}
        pieces = tensor["pieces"]
        for number, piece in enumerate(pieces):
            where = ("tensors", name, "pieces")
            yield (
                f"{name} lacks {number}",
                changed(content, where, pieces[:number] + pieces[number + 1 :]),
            )
            yield f"{name} repeats {number}", changed(content, where, [*pieces, piece])
            overlap = {**piece, "count": piece["count"] + 1}
            yield f"{name} overlaps {number}", changed(content, (*where, number), overlap)
            offsets = piece["bytes_at"]
            swapped = {**offsets, "master": offsets["exp_avg"], "exp_avg": offsets["master"]}
            exchanged = {**piece, "bytes_at": swapped}
            yield f"{name} exchanges {number}", changed(content, (*where, number), exchanged)
    first, second = "layers.0.ffn.up.weight", "layers.1.ffn.up.weight"
    tensors = dict(content["tensors"])
    tensors[first], tensors[second] = tensors[second], tensors[first]
    yield "two tensors exchanged", {**content, "tensors": tensors}


def records() -> list[ParameterRecord]:
    """Return the whole model on one rank, as `generate` builds it."""
    return [
        ParameterRecord(
            parameter=torch.nn.Parameter(torch.full(shape, -1.0)),
            unit="",
            placements=(Placement(name, shape, (0,) * len(shape), (0,) * len(shape), shape),),
            group="matrices",
            counted=True,
            tensor_partial=False,
            tied=False,
        )
        for name, shape in MODEL.items()
    ]


def inspect(checkpoint: Checkpoint, out: Path) -> None:
    text = io.StringIO()
    show(checkpoint, Console(file=text, width=100))
    assert "\x1b" not in text.getvalue()


def verify_all(checkpoint: Checkpoint, out: Path) -> None:
    verify(checkpoint, Console(file=io.StringIO()))


def export_all(checkpoint: Checkpoint, out: Path) -> None:
    export(checkpoint, out, "fp32", lambda count: None)
    exported = load_file(out)
    assert exported.keys() == MODEL.keys()
    for name, tensor in exported.items():
        np.testing.assert_array_equal(tensor.numpy(), value(name, "master", 4))


def generate(checkpoint: Checkpoint, out: Path) -> None:
    model = records()
    load_weights(checkpoint, model)
    for record in model:
        expected = value(record.placements[0].name, "master", 4)
        np.testing.assert_array_equal(record.parameter.detach().numpy(), expected)


def test_no_manifest_ends_in_a_traceback_or_in_wrong_weights(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / MANIFEST).read_bytes())
    content.pop("xxh3_128")
    cases = list(edits(content))
    assert len(cases) > 400
    messages, refused = list[str](), set[str]()
    for description, case in [("unchanged", content), *cases]:
        write(folder, case)
        for use in (inspect, verify_all, export_all, generate):
            try:
                with cpu_seconds(10):
                    use(Checkpoint.open(folder), tmp_path / "out.safetensors")
            except CheckpointError as error:
                messages.append(str(error))
                refused.add(description)
            except Exception as error:
                pytest.fail(f"{description}, {use.__name__}: {type(error).__name__}: {error}")
    assert not {"\x1b", "\0"} & set("".join(messages))
    assert "unchanged" not in refused
    assert len(refused) > 0.8 * len(cases)


@pytest.mark.parametrize(
    ("key", "new", "message"),
    [
        ("chunk_bytes", -1, "damaged at chunk_bytes: Input should be a multiple of 4096, it is -1"),
        ("chunk_bytes", 8192, r"files\.rank_\d+\.safetensors\.chunks: it has"),
        ("step", 10**30, "damaged at step"),
        ("meta", {"\x1b[31m": 1}, r"damaged at meta\.\\x1b"),
    ],
)
def test_a_refusal_names_the_entry(folder: Path, key: str, new: object, message: str) -> None:
    content = json.loads((folder / MANIFEST).read_bytes())
    content.pop("xxh3_128")
    write(folder, {**content, key: new})
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_random_changes_of_several_numbers(folder: Path, tmp_path: Path) -> None:
    """Changes that fit together are refused as well, or leave the weights as they were."""
    content = json.loads((folder / MANIFEST).read_bytes())
    content.pop("xxh3_128")
    numbers = [
        path for path in leaves(content["tensors"]) if isinstance(at(content["tensors"], path), int)
    ]
    draw = random.Random(5)
    for _ in range(150):
        case = content
        for path in draw.sample(numbers, draw.randint(1, 4)):
            new = at(content["tensors"], path) + draw.choice([-4096, -24, -4, -1, 1, 4, 24, 4096])
            case = changed(case, ("tensors", *path), new)
        write(folder, case)
        for use in (export_all, generate):
            try:
                with cpu_seconds(10):
                    use(Checkpoint.open(folder), tmp_path / "out.safetensors")
            except CheckpointError:
                continue


@given(st.data())
def test_ranges_are_accepted_if_they_store_every_element_once(data: st.DataObject) -> None:
    """The oracle counts how often each element of the tensor and of each box is stored.

    A save stores boxes as a whole, so a box of which a part is missing is refused, too.
    """
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=0, max_size=3)))
    counts, pieces, end = np.zeros(shape, dtype=int), [], 8
    in_boxes: dict[object, int | np.ndarray] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        box = tuple(
            data.draw(st.integers(1, size - at)) for at, size in zip(start, shape, strict=True)
        )
        first = data.draw(st.sampled_from([0, 0, prod(box) // 2]))
        count = data.draw(st.sampled_from([prod(box) - first, prod(box) - first, 1]))
        stored = np.zeros(prod(box), dtype=int)
        stored[first : first + count] = 1
        in_boxes[start, box] = in_boxes.get((start, box), 0) + stored
        counts[tuple(slice(a, a + n) for a, n in zip(start, box, strict=True))] += stored.reshape(
            box
        )
        pieces.append({
            "file": "rank_00000.safetensors", "start": start, "shape": box, "first": first,
            "count": count, "keys": {"master": f"x.{len(pieces)}.master"},
            "bytes_at": {"master": end},
        })  # fmt: skip
        end += 4 * count
    content = {
        "format": 1, "step": 1, "world": 1, "repeats": False, "chunk_bytes": 4096,
        "files": {"rank_00000.safetensors": {"size": end, "chunks": ["0" * 32]}},
        "tensors": {"x": {"shape": shape, "pieces": pieces}}, "meta": {},
    }  # fmt: skip
    rest = json.dumps(content, separators=(",", ":")).encode()[1:]
    text = b'{"xxh3_128":"%s",%s' % (xxhash.xxh3_128_hexdigest(rest).encode(), rest)
    if all((stored == 1).all() for stored in (counts, *in_boxes.values())):
        Manifest.parse(text, "manifest")
    else:
        with pytest.raises(CheckpointError, match="do not store every element exactly once"):
            Manifest.parse(text, "manifest")
