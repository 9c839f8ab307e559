"""States are predicted to the byte, activations tensor by tensor, stages one by one."""

import pytest
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from frontier_lab.planning.bounds import least_activations
from frontier_llm.geometry import host_pool
from frontier_llm.planner.block import chunk_blocks
from frontier_llm.planner.memory import (
    STATES,
    fullest,
    kinds_activations,
    stage_memory,
    stages_memory,
)
from frontier_llm.planner.timeline import shortened
from frontier_llm.saving import tier_writers
from frontier_llm.saving.tier_writers import TierWriters
from tests.planner.layouts import make
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.values import SIDES, T5GEMMA, T5GEMMA2, tiny_values

pytestmark = pytest.mark.slow

FACTORS = [(1, 1, 1), (1, 1, 4), (1, 4, 4), (2, 2, 4), (4, 4, 4)]


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("formats", ["plain", "zeropp_feedback"])
def test_states_are_those_of_the_geometry_for_every_stage(factors, formats):
    names = ("params", "grads", "optimizer")
    candidate = make(
        "parallel.pipeline=2",
        f"collectives={formats}",
        *(f"sharding.{name}={factor}" for name, factor in zip(names, factors, strict=True)),
    )
    for stage in range(2):
        geometry = candidate.layout.state_bytes(stage)
        planned = stage_memory(candidate, stage).by_category
        assert {name: planned[name] for name in geometry} == geometry


def test_the_first_stage_of_1f1b_holds_most_micro_batches():
    candidate = make("parallel.pipeline=4", "data.global_batch=16")
    held = [memory.by_category["activations"] for memory in stages_memory(candidate)]
    layer = held[2] / 2  # one layer a stage; the last stage has the final norm besides
    assert held[0] == pytest.approx(4 * layer)
    assert held[1] == pytest.approx(3 * layer)


def test_no_more_micro_batches_are_in_flight_than_there_are():
    few = make("parallel.pipeline=4", "data.global_batch=4")  # two a replica
    many = make("parallel.pipeline=4", "data.global_batch=16")
    assert (
        stage_memory(few, 0).by_category["activations"] * 2
        == stage_memory(many, 0).by_category["activations"]
    )


def test_chunks_hold_more_than_1f1b():
    plain = make("parallel.pipeline=2", "data.global_batch=16")
    chunked = make("parallel.pipeline=2", "parallel.chunks=2", "data.global_batch=16")
    a, b = (stage_memory(c, 0).by_category["activations"] for c in (plain, chunked))
    assert b == pytest.approx(1.25 * a)  # Narayanan et al.: 1 + (S - 1) / (S C)


def test_recomputation_keeps_the_inputs_of_layers_alone():
    full = make("recompute=full", "parallel.tensor=2")
    config = full.config
    kept = stage_memory(full, 0).by_category["activations"]
    tokens = config.data.micro_batch * config.data.sequence_length
    assert kept == (config.model.layers + 2) * tokens * config.model.hidden * 2


def test_the_fullest_stage_is_the_fullest_of_all():
    for overrides in (["parallel.pipeline=4"], ["parallel.pipeline=2", "parallel.chunks=2"]):
        candidate = make("data.global_batch=16", *overrides)
        assert fullest(candidate).total == max(m.total for m in stages_memory(candidate))


def test_a_lazy_checkpoint_takes_host_memory_for_a_devices_intervals():
    candidate = make("sharding=zero1", "checkpoint=lazy")
    memory = stage_memory(candidate, 0)
    states = memory.by_category["master"] + memory.by_category["moments"]
    chunks = -(-states // host_pool.CHUNK_BYTES)
    assert memory.host_bytes == (chunks + 1) * host_pool.CHUNK_BYTES  # one for the writer
    assert stage_memory(make("checkpoint=off"), 0).host_bytes == 0


def measure_kept(world, values, precision):
    """Return the bytes that a forward pass keeps for backward, parameters left out."""
    rig = make_rig(world, values, precision)
    parameters = {record.parameter.untyped_storage().data_ptr() for record in rig.model.records}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    batch = rig.batches(0)[0]
    rig.states.begin_step(1, 1)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        rig.model.chunks[0](batch.tokens, batch.positions)
    del batch
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.activation=swiglu", "model.positions=rotary"],
        ["data.micro_batch=2", "model.ffn=96"],
        ["model.norm=rmsnorm", "model.norm_placement=both", "model.zero_centred_norms=true"],
        ["parallel.tensor=2", "model.qk_norm=width"],
        ["parallel.tensor=2", "model.qk_norm=width", "model.positions=rotary"],
    ],
)
def test_a_layer_keeps_what_was_counted(overrides):
    """The difference between models of four and of two layers is two layers."""
    sizes = ["model.hidden=64", "data.sequence_length=64", "recompute=none", "model.bias=false"]
    ranks = 2 if "parallel.tensor=2" in overrides else 1
    measured = [
        run_ranks(
            measure_kept, ranks, tiny_values(*sizes, *overrides, f"model.layers={n}"), "fp32"
        )[0]
        for n in (2, 4)
    ]
    candidate = make(*sizes, *overrides, "precision=fp32", ranks=ranks, ranks_per_node=ranks)
    ((block, _),) = chunk_blocks(candidate.layout, candidate.stages.kinds[0].chunks[0])
    assert (measured[1] - measured[0]) / 2 == pytest.approx(4 * block.kept_elements, rel=0.05)


LAYOUTS = [
    (4, ["sharding=replicated"], "fp32"),
    (4, ["sharding=zero1"], "bf16"),
    (4, ["sharding=zero2"], "bf16"),
    (4, ["sharding=zero3"], "fp32"),
    (4, ["sharding=mics"], "bf16"),
    (4, ["sharding=zeropp"], "bf16"),
    (4, ["sharding.params=2", "sharding.grads=2", "sharding.optimizer=4"], "bf16"),
    (2, ["parallel.pipeline=2"], "bf16"),
    (4, ["parallel.pipeline=2", "parallel.chunks=2", "sharding=zero1"], "fp32"),
    (2, ["parallel.tensor=2", "parallel.sequence=true"], "bf16"),
    (4, ["parallel.tensor=2", "sharding=zero3", "model.tied=false"], "bf16"),
    (4, ["parallel.pipeline=2", "sharding=zero3", *T5GEMMA, "model.vocabulary=256"], "bf16"),
    (4, ["parallel.pipeline=4", *SIDES, "model.vocabulary=256"], "bf16"),
    (4, ["parallel.pipeline=2", "sharding=zero3", *T5GEMMA2, "model.vocabulary=256"], "bf16"),
    (4, ["sharding=zero1", "model.activation=swiglu", "model.positions=rotary"], "bf16"),
]


def allocate(world, values, precision):
    rig = make_rig(world, values, precision)
    writers = TierWriters(rig.config, world, dist.HashStore(), rig.states, rig.groups)
    pool = writers._pool.size if world.rank % 2 == 0 else None  # the first rank of its node
    return rig.groups.coordinates.pipeline, rig.states.memory_bytes(), pool


@pytest.mark.parametrize(("ranks", "overrides", "precision"), LAYOUTS)
def test_what_is_planned_is_allocated_to_the_byte(ranks, overrides, precision, monkeypatch):
    monkeypatch.setattr(host_pool, "CHUNK_BYTES", 4096)  # small chunks show small differences
    monkeypatch.setattr(tier_writers, "CHUNK_BYTES", 4096)
    partner = str(ranks > 2).lower()  # two ranks are one node
    levels = ["checkpoint.tiers.local.path=/tmp", f"checkpoint.partner={partner}"]
    overrides = [*overrides, *levels]
    values = tiny_values(*overrides, f"precision={precision}")
    candidate = make(*overrides, f"precision={precision}", ranks=ranks, ranks_per_node=2)
    for stage, allocated, pool in run_ranks(allocate, ranks, values, precision, ranks_per_node=2):
        memory = stage_memory(candidate, stage)
        planned = memory.by_category
        assert {name: planned[name] for name in STATES} == {n: allocated[n] for n in STATES}
        assert pool in (None, memory.host_bytes)


def test_flex_attention_reads_and_writes_no_bias():
    t5 = ("model=mt5_tiny", "model.vocabulary=256", "data=stdlib_spans", "parallel.tensor=2")
    moved, kept = {}, {}
    for attention in ("sdpa", "flex"):
        candidate = make(*t5, f"attention={attention}")
        blocks = chunk_blocks(candidate.layout, candidate.stages.kinds[0].chunks[0])
        moved[attention] = [block.moved_elements for block, _ in blocks]
        kept[attention] = [block.kept_elements for block, _ in blocks]
    lengths, heads = candidate.layout.lengths, candidate.layout.model.heads // 2
    biases = [heads * length**2 for length in (lengths.encoder, lengths.decoder)]
    differences = [a - b for a, b in zip(moved["sdpa"], moved["flex"], strict=True)]
    assert differences == [2 * bias for bias in biases]
    assert kept["sdpa"] == kept["flex"]


SPLIT = [
    ("1f1b", 1, 2), ("zb_h1", 1, 0), ("interleaved", 2, 1), ("zb_v", 2, 0), ("zb_v", 2, 2),
    ("v_half", 2, 0),
]  # fmt: skip


def _walk(candidate, stage):
    """Return the most bytes that a stage holds, from a set of what waits after every action."""
    layout = candidate.layout
    kept, factors = [], []
    for chunk in layout.chunks_of_stage(stage):
        ((block, count),) = chunk_blocks(layout, chunk)
        norm = 2 * layout.micro_batch * layout.sequence_length * layout.model.hidden
        full = layout.recompute == "full"
        elements = count * (block.input_elements if full else block.kept_elements)
        kept.append(2 * (elements + norm * chunk.has_head))
        factors.append(2 * count * block.factor_elements)
    waiting, most = {}, 0
    for kind, index, micro_batch in layout.schedule.actions[stage]:
        waiting.pop((index, micro_batch), None)
        if kind == "forward":
            waiting[index, micro_batch] = kept[index]
        if kind == "input_gradients":
            waiting[index, micro_batch] = factors[index]
        most = max(most, sum(waiting.values()))
    assert waiting == {}
    return most


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("name", "chunks", "waiting"), SPLIT)
def test_activations_are_those_of_a_walk_through_the_whole_list(name, chunks, waiting, recompute):
    candidate = make(
        "parallel.pipeline=4", f"parallel.chunks={chunks}", f"parallel.schedule={name}",
        f"parallel.waiting_weights={waiting}", "data.global_batch=94", "data.micro_batch=1",
        "model.layers=8", "model.tied=false", f"recompute={recompute}", ranks=8,
    )  # fmt: skip
    layout = candidate.layout
    assert shortened(layout).micro_batches < layout.micro_batches
    for memory in stages_memory(candidate):
        walked = _walk(candidate, memory.stage)
        assert memory.by_category["activations"] == pytest.approx(walked, rel=1e-6)
    assert fullest(candidate).total == max(m.total for m in stages_memory(candidate))
    least, exact = least_activations(candidate), kinds_activations(candidate)
    assert all(a.kept <= b.kept for a, b in zip(least, exact, strict=True))


def test_linear_layers_keep_sixteen_elements_for_weight_gradients():
    """In units of tokens x hidden: 7 of inputs, and 9 of gradients of outputs."""
    ratios = {}
    for sequence in ("false", "true"):
        candidate = make("parallel.tensor=2", f"parallel.sequence={sequence}", "model.ffn=128")
        layout = candidate.layout
        model = layout.model
        assert (model.hidden, model.ffn, model.heads) == (32, 128, model.kv_heads)
        ((block, _),) = chunk_blocks(layout, layout.model_chunks[0])
        ratios[sequence] = block.factor_elements / (
            layout.micro_batch * layout.sequence_length * model.hidden
        )
    # two inputs and the gradients of two outputs are whole on every tensor rank; with sequence
    # parallelism the inputs are not
    assert ratios == {"false": 4 + (16 - 4) / 2, "true": 2 + (16 - 2) / 2}


def test_waiting_weight_gradients_keep_buffers_of_sharded_gradients():
    base = ("parallel.pipeline=2", "model.layers=16", "sharding=zero2", "parallel.schedule=1f1b")
    sizes = []
    for waiting in (0, 1):
        candidate = make(*base, "data.global_batch=16", f"parallel.waiting_weights={waiting}")
        sizes.append(stage_memory(candidate, 0).by_category["reductions"])
    kind, formats = candidate.stages.kinds[0], candidate.layout.formats
    # all units may be written to, `units_in_flight` are sent, and a table has a gradient in bf16
    buffered = (kind.elements + 2 * kind.units[-1][0]) * formats.grads.widest.element_bytes
    assert sizes[1] == buffered + 2 * kind.largest_table
    assert sizes[0] < sizes[1] / 2


def _temporary(*overrides, stage=0):
    return stage_memory(make(*overrides), stage).by_category


def test_logits_and_temporary_tensors_of_a_layer_do_not_add_up():
    wide = _temporary("model.vocabulary=4096", "data.vocabulary=4096", "sharding=replicated")
    assert wide["logits"] > 0
    assert wide["working"] == 0
    deep = _temporary("model.ffn=8192", "sharding=replicated")
    assert deep["logits"] == 0
    assert deep["working"] > 0


def test_activations_that_are_freed_make_room_for_reductions():
    """If buffers grow by less than a layer frees, the peak is at the beginning of the pass."""
    small = _temporary("sharding=zero2", "data.sequence_length=256", "data.micro_batch=1")
    large = _temporary("sharding=zero2", "data.sequence_length=16", "model.layers=8")
    kept = _temporary("sharding=replicated", "data.sequence_length=256", "data.micro_batch=1")
    assert small["activations"] == kept["activations"]
    kept = _temporary("sharding=replicated", "data.sequence_length=16", "model.layers=8")
    assert large["activations"] < kept["activations"]
    assert large["reductions"] > 0
