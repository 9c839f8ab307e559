"""A step's seconds: parts that add up, schedules that are followed, traffic that is hidden."""

from dataclasses import replace

import pytest

from frontier_llm.cli.experiments import composed
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.flops import step_hardware_flops
from frontier_llm.geometry.lengths import sample_lengths
from frontier_llm.planner.block import Product, chunk_blocks, stage_activations
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.compute import Speed
from frontier_llm.planner.estimate import estimate
from frontier_llm.planner.layout_time import LayoutTime
from frontier_llm.planner.step_time import step_time
from tests.planner.layouts import make
from tests.values import TINY_T5


def _large(*overrides, ranks=1024):
    config = composed("experiment=frontier_175b", *overrides)
    return Candidate.of(config, ranks, 8)


def _amsp(size, params):
    sharding = (f"sharding.params={params}", "sharding.grads=all", "sharding.optimizer=all")
    return Candidate.of(composed(f"experiment=amsp_llama_{size}", *sharding), 1024, 8)


def _seconds(candidate):
    return step_time(candidate).seconds


def _with_engine(candidate, **values):
    planner = candidate.config.planner
    engine = planner.engine.model_copy(update=values)
    planner = planner.model_copy(update={"engine": engine})
    return replace(candidate, config=candidate.config.model_copy(update={"planner": planner}))


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.pipeline=4", "data.global_batch=16"],
        ["parallel.pipeline=2", "parallel.chunks=2", "data.global_batch=16"],
        ["sharding=zero3", "parallel.tensor=2"],
        ["sharding=zeropp", "collectives=zeropp"],
        ["model.tied=false", "recompute=selective"],
    ],
)
def test_parts_add_up_to_the_step(overrides):
    time = step_time(make(*overrides))
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert all(seconds >= 0 for seconds in time.parts.values())
    assert all(seconds >= 0 for seconds in time.exposed.values())


def test_more_micro_batches_shrink_the_bubble():
    few, many = (step_time(_large(f"data.global_batch={n}")).bubble_fraction for n in (640, 6400))
    assert few > 2 * many > 0


def test_no_device_is_faster_than_its_calibration():
    candidate = _large()
    config = candidate.config
    flops = step_hardware_flops(
        config.model, sample_lengths(config.model, config.data), 640, "full"
    )
    curve = config.cluster.device.calibration.products["fp16"]
    assert _seconds(candidate) > 0.8 * flops / (1024 * curve.tflops * 1e12)


def test_nothing_hidden_is_slower_and_parameters_in_the_node_faster_than_everywhere():
    everywhere, in_node = _amsp("7b", 1024), _amsp("7b", 8)
    assert _seconds(in_node) < _seconds(everywhere)
    assert _seconds(everywhere) < _seconds(_with_engine(everywhere, overlaps=False))


def test_quantised_gradients_save_time_between_nodes():
    plain, quantised = (
        Candidate.of(composed("experiment=zeropp_18b", f"collectives={name}"), 384, 16)
        for name in ("plain", "zeropp")
    )
    assert _seconds(quantised) < _seconds(plain)


def test_a_second_copy_spares_the_backward_gather():
    without = _with_engine(_amsp("13b", 1024), overlaps=False)
    assert _seconds(_with_engine(without, second_copy_ranks=8)) < _seconds(without)


def test_recomputation_that_stops_early_saves_a_product():
    full = _large("recompute=full")
    early = _with_engine(full, recompute_stops_early=True)
    assert _seconds(early) < _seconds(full)
    kept = _large("recompute=none")
    assert _seconds(_with_engine(kept, recompute_stops_early=True)) == _seconds(kept)


def test_broadcasts_pass_on_every_updated_parameter():
    gathered = _with_engine(_amsp("7b", 1), overlaps=False)
    sent = _with_engine(gathered, broadcasts_refresh=True)
    parts = [step_time(candidate).parts["refresh_params"] for candidate in (gathered, sent)]
    assert parts[1] / parts[0] == pytest.approx(1024 / 1023)


def test_owners_that_broadcast_take_turns():
    sent = _with_engine(_amsp("7b", 1), overlaps=False, broadcasts_refresh=True)
    slow = _with_engine(sent, refresh_owner_us=1000)
    parts = [step_time(candidate).parts["refresh_params"] for candidate in (sent, slow)]
    assert parts[1] - parts[0] == pytest.approx(1.024)
    gathered = _with_engine(slow, broadcasts_refresh=False)
    assert step_time(gathered).parts["refresh_params"] < parts[0]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_program_may_reduce_sharded_gradients_once_a_step(pipeline):
    each = make("sharding=zero2", f"parallel.pipeline={pipeline}", "data.global_batch=32")
    each = _with_engine(each, overlaps=False)
    parts = step_time(each).parts
    once = step_time(_with_engine(each, reduces_once=True)).parts
    if pipeline == 1:
        assert once == parts
        return
    count = each.layout.micro_batches
    assert once["reduce_grads"] == 0
    added = once["reduce_states"] - parts["reduce_states"]
    assert added == pytest.approx(parts["reduce_grads"] / count)


@pytest.mark.parametrize(("sharding", "added"), [("zero1", 0), ("zero2", 3 / 4 * 12 / 2)])
def test_measured_products_leave_tables_and_reduced_gradients_to_add(sharding, added):
    """Four micro-batches, of which the first writes the sums, on two ranks."""
    keys = "model=gpt_tiny", "parallel.pipeline=1", "precision=fp32", "cluster=cpu_laptop"
    kernels = "attention_tflops: 1, attention_backward_tflops: 1, elementwise_gb_per_second: 9"
    measured = f"{{{kernels}, weight_gradient_ratio: 1}}"
    config = composed(
        *keys, f"sharding={sharding}", "data.micro_batch=1", "data.global_batch=8",
        f"+cluster.device.calibration.kernels.fp32={measured}",
    )  # fmt: skip
    candidate = Candidate.of(config, 2, 2)
    layout = LayoutTime(candidate)
    (chunk,) = layout.passes[0].chunks
    costs = layout.rates.state_costs(candidate, layout.passes[0].kind)
    model = config.model
    tables = model.vocabulary * model.hidden
    if model.positions == "learned":
        tables += candidate.layout.sequence_length * model.hidden
    passes = chunk.compute.forward + chunk.backward_compute
    rest = step_time(candidate).parts["compute"] / 4 - passes
    assert rest == pytest.approx(layout.speed.moved(16 * tables + added * costs.elements, 0), 0.01)


def test_products_run_at_the_speed_of_the_program():
    shared = _large("kernels=compiled")
    fast = step_time(_with_engine(shared, product_ratio=1.25)).parts["compute"]
    assert 0.8 < fast / step_time(shared).parts["compute"] < 0.85


def test_tensor_ranks_wait_for_the_slowest_in_each_collective():
    quick = _large("parallel.tensor=4", "parallel.sequence=false", "recompute=none")
    host = quick.config.planner.engine.host.model_copy(update={"tensor_wait_us": 100.0})
    slow = _with_engine(quick, host=host)
    parts = [step_time(candidate).parts["tensor"] for candidate in (quick, slow)]
    layers = max(sum(len(c.layers) for c in kind.chunks) for kind in quick.stages.kinds)
    waits = quick.layout.micro_batches * layers * 4 * 3 * 100e-6
    assert parts[1] - parts[0] == pytest.approx(waits)


def test_heads_of_odd_bytes_slow_unfused_attention_down():
    """With 112 heads of 128 elements, and 108 that are not a multiple of 8."""
    sizes = (("model.hidden=3584", "model.heads=28"), ("model.hidden=3024", "model.heads=28"))
    seconds = []
    for hidden, heads in sizes:
        candidate = _large(hidden, heads, "parallel.tensor=4", "recompute=selective")
        unfused = step_time(_with_engine(candidate, fused_attention=False)).parts["compute"]
        seconds.append(unfused / step_time(candidate).parts["compute"])
    assert seconds[1] > 1.3 * seconds[0]


def test_attention_that_is_not_fused_and_unfused_elementwise_kernels_take_longer():
    fused = _large()
    assert _seconds(_with_engine(fused, fused_attention=False)) > _seconds(fused)
    assert _seconds(_with_engine(fused, elementwise_factor=2.0)) > _seconds(fused)


def test_recomputation_costs_a_forward_pass():
    none, full = (step_time(_large(f"recompute={how}")).parts for how in ("none", "full"))
    assert 1.25 < full["compute"] / none["compute"] < 1.4


def test_without_processors_a_cube_of_three_half_sizes_runs_at_half_speed():
    device = composed("cluster=cpu_laptop").cluster.device
    curve = device.calibration.products["bf16"]
    speed = Speed(device, "bf16")
    side = 3 * round(curve.half_size * 100)  # long before a kernel's start matters
    ratio = speed.product(Product(side, side, side)) * curve.tflops * 1e12 / (2 * side**3)
    assert ratio == pytest.approx(1.01, rel=1e-3)


def test_blocking_checkpoints_stall_and_lazy_ones_do_not():
    blocking, lazy, often = (
        step_time(
            _large(f"checkpoint={mode}", f"checkpoint.every_steps={every}", "sharding=replicated")
        )
        for mode, every in (("blocking", 50), ("lazy", 50), ("lazy", 1))
    )
    assert blocking.parts["checkpoint"] > 0
    assert lazy.parts["checkpoint"] == 0
    assert often.parts["checkpoint"] > 0


def test_an_encoder_decoder_takes_longer_over_its_encoder():
    short, long = (
        Candidate.of(
            composed(
                "model=mt5_base", "cluster=a100_80g", "precision=bf16", "parallel.pipeline=1",
                f"data.sequence_length={length}", "data.global_batch=64", "data=stdlib_spans",
            ),
            8, 8,
        )
        for length in (1024, 8192)
    )  # fmt: skip
    assert 2 * _seconds(short) < _seconds(long)


def test_a_tied_table_is_summed_over_the_link_between_ends():
    tied, untied = (
        step_time(
            Candidate.of(
                composed(
                    "experiment=frontier_22b", "sharding=replicated", f"model.tied={tied}",
                ), 16, 8,
            )
        )
        for tied in ("true", "false")
    )  # fmt: skip
    more = tied.parts["reduce_states"] - untied.parts["reduce_states"]
    assert more > 0
    # one of the stages' borders is one of nodes, so that messages use the network, too
    assert tied.exposed["network"] - untied.exposed["network"] == pytest.approx(more)


def test_mfu_is_that_of_the_geometry():
    estimated = estimate(_large())
    assert estimated.hfu == pytest.approx(estimated.hardware_tflops / 191.5)
    assert estimated.mfu < estimated.hfu < 0.6


def test_an_unknown_speed_is_an_error_that_names_the_format():
    device = composed("cluster=dgx2_v100", "precision=fp16").cluster.device
    with pytest.raises(ConfigError, match="precision"):
        Speed(device, "bf16")


def test_context_ranks_divide_activations_and_pay_for_the_exchange():
    """Half of the products and of what is kept; between nodes the exchange takes longer."""
    long = ("data.sequence_length=4096", "parallel.pipeline=1", "sharding=replicated")
    long += ("model.kv_heads=1",)  # ranks send rows
    whole, cut = (
        make(*long, f"parallel.context={context}", f"data.global_batch={8 // context}")
        for context in (1, 2)
    )
    found = [LayoutTime(each)._chunks(each.stages.kinds[0])[0] for each in (whole, cut)]
    alone, half = (
        chunk_blocks(each.layout, each.layout.model_chunks[0])[0][0] for each in (whole, cut)
    )
    assert half.attention_flops == alone.attention_flops / 2
    assert sum(p.flops for p in half.products) == sum(p.flops for p in alone.products) / 2
    assert found[0].tensor.forward == 0 < found[1].tensor.forward
    assert found[1].tensor.backward == 2 * found[1].tensor.forward
    kept = [stage_activations(each, 0, each.stages.kinds[0]).kept for each in (whole, cut)]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.01)
    far = make(*long, "parallel.context=8", "data.global_batch=1", ranks_per_node=2)
    near = make(*long, "parallel.context=8", "data.global_batch=1", ranks_per_node=8)
    seconds = [
        LayoutTime(each)._chunks(each.stages.kinds[0])[0].tensor.forward for each in (near, far)
    ]
    assert seconds[1] > 1.5 * seconds[0]


def test_separate_documents_exchange_less_and_keep_angles_of_each_sample():
    common = (
        "data.sequence_length=131072", "parallel.pipeline=1", "parallel.context=4",
        "data.global_batch=4", "data.micro_batch=2", "model.positions=rotary", "model.heads=2",
    )  # fmt: skip
    joined = make(*common)
    seconds, kept = [], []
    for share in (1.0, 0.4, 0.05):
        each = make(*common, "data.documents=separate", f"data.read_share={share}")
        seconds.append(LayoutTime(each)._chunks(each.stages.kinds[0])[0].tensor.forward)
        kept.append(stage_activations(each, 0, each.stages.kinds[0]).kept)
    whole = LayoutTime(joined)._chunks(joined.stages.kinds[0])[0].tensor.forward
    assert whole == seconds[0] > seconds[1] > 2 * seconds[2] > 0
    layout = joined.layout
    angles = 4 * 32768 * layout.model.rotated_width * len(layout.model_chunks[0].layers)
    alone = stage_activations(joined, 0, joined.stages.kinds[0]).kept
    assert kept[0] - alone == angles * layout.compute_bytes


def test_packed_texts_read_fewer_keys_on_both_sides():
    packed = (
        "model.vocabulary=512",
        "parallel.pipeline=1",
        "data.documents=separate",
        "data.packing=best_fit",
    )
    found = []
    for share in (1.0, 0.25):
        layout = make(*TINY_T5, *packed, f"data.read_share={share}").layout
        blocks = [block for block, _ in chunk_blocks(layout, layout.model_chunks[0])]
        found.append([block.attention_flops for block in blocks])
    assert found[1] == [0.25 * flops for flops in found[0]]
    assert len(found[0]) == 2, "an encoder layer and a decoder layer"
    assert min(found[0]) > 0
