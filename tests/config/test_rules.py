"""Each rule names the key to change, and what it says to do passes the rule."""

import copy
import re

import pytest
import yaml

from frontier_llm.cli.compose import compose
from frontier_llm.config import decode
from frontier_llm.config.data import FIXED_PIECES
from frontier_llm.config.rules import check, data_size
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.resolved import ResolvedLayout

MICS = {"params": 2, "grads": 2, "optimizer": 2}


@pytest.fixture(scope="module")
def defaults():
    """Compose the root once; a test changes a copy."""
    return compose([])


def _refusal(values, ranks):
    with pytest.raises(ConfigError) as caught:
        check(decode(values), ranks)
    return caught.value


def _changed(values, changes):
    values = copy.deepcopy(values)
    for key, value in changes.items():
        section, _, leaf = key.rpartition(".")
        place = values
        for part in filter(None, section.split(".")):
            place = place[part]
        place[leaf] = value
    return values


def _advised(values, ranks, todo):
    """Follow the first assignment of a `do:` line."""
    key, value = re.search(r"([a-z_.]+)=([^\s,;:)]+)", todo).groups()
    if key == "launch.ranks":
        return values, int(value)
    return _changed(values, {key: yaml.safe_load(value)}), ranks


# a row: ranks, what is wrong, the key that is named, what `do:` begins with
CUT = {"parallel.context": 2, "data.micro_batch": 1, "parallel.pipeline": 1}
REFUSED = {
    "context ranks that do not divide the data ranks": (
        4,
        {"parallel.context": 3, "data.micro_batch": 1, "parallel.pipeline": 1},
        "parallel.context",
        "set parallel.context=2",
    ),
    "samples that context ranks cannot halve": (
        4,
        {**CUT, "data.sequence_length": 30},
        "data.sequence_length",
        "set data.sequence_length=32",
    ),
    "parts that tensor ranks cannot divide": (
        4,
        {**CUT, "data.sequence_length": 36, "parallel.tensor": 2, "parallel.sequence": True},
        "data.sequence_length",
        "set data.sequence_length=40",
    ),
    "attention dropout of cut samples": (
        4,
        {**CUT, "model.attention_dropout": 0.1},
        "model.attention_dropout",
        "set model.attention_dropout=0",
    ),
    "FlexAttention of cut samples": (
        4,
        {**CUT, "attention": "flex"},
        "attention",
        "set attention=sdpa",
    ),
    "compiled layers of cut samples": (
        4,
        {**CUT, "kernels": "compiled"},
        "kernels",
        "set kernels=auto",
    ),
    "ranks that stages do not divide": (
        6,
        {"parallel.pipeline": 4},
        "parallel.tensor x parallel.pipeline",
        "start 8 ranks (launch.ranks=8",
    ),
    "more stages than ranks": (
        2,
        {"parallel.pipeline": 4},
        "parallel.tensor x parallel.pipeline",
        "start 4 ranks (launch.ranks=4",
    ),
    "unequal nodes": (
        4,
        {"launch.ranks_per_node": 3},
        "launch.ranks_per_node",
        "set launch.ranks_per_node=2;",
    ),
    "heads that tensor ranks do not divide": (
        4,
        {"parallel.tensor": 2, "model.heads": 5, "model.hidden": 40},
        "model.heads",
        "set model.heads=8, or parallel.tensor to a divisor of 5",
    ),
    "KV heads that tensor ranks do not divide": (
        4,
        {"parallel.tensor": 2, "model.kv_heads": 1},
        "model.kv_heads",
        "set model.kv_heads=2, or parallel.tensor to a divisor of 1",
    ),
    "an ffn that tensor ranks do not divide": (
        4,
        {"parallel.tensor": 2, "model.ffn": 101},
        "model.ffn",
        "set model.ffn=102",
    ),
    "queries in unequal groups": (
        4,
        {"model.kv_heads": 3},
        "model.kv_heads",
        "set model.kv_heads=2;",
    ),
    "heads that would be rotated in odd widths": (
        4,
        {"model.heads": 3, "model.positions": "rotary"},
        "model.heads",
        "set model.hidden=258, or model.heads to one of 1, 2, 4, 8, 16, 32, 64, 128, or model.head",
    ),
    "heads that KV heads and tensor ranks do not divide": (
        8,
        {"parallel.tensor": 4, "model.heads": 10, "model.kv_heads": 8, "model.hidden": 320},
        "model.heads",
        "set model.heads=16, or parallel.tensor to a divisor of 10",
    ),
    "context ranks without enough ranks for the default stages": (
        2,
        {"parallel.context": 2, "parallel.pipeline": 2},
        "parallel.context",
        "set parallel.context=1, or set parallel.pipeline=1, or start a multiple of 4 ranks",
    ),
    "a width that heads do not divide": (
        4,
        {"model.hidden": 255},
        "model.heads",
        "set model.hidden=256, or model.heads to one of 1, 3, 5, 15, 17, 51, 85, 255",
    ),
    "chunks without a pipeline": (
        4,
        {"parallel.pipeline": 1, "parallel.chunks": 2},
        "parallel.chunks",
        "set parallel.chunks=1",
    ),
    "more model chunks than layers": (
        4,
        {"parallel.pipeline": 4, "parallel.chunks": 2},
        "parallel.pipeline x parallel.chunks",
        "lower parallel.pipeline or parallel.chunks, or set model.layers=8",
    ),
    "a cut of the wrong length": (
        4,
        {"parallel.layers_per_stage": [1, 1, 2]},
        "parallel.layers_per_stage",
        "set parallel.layers_per_stage=null",
    ),
    "a cut with the wrong sum": (
        4,
        {"parallel.layers_per_stage": [2, 3]},
        "parallel.layers_per_stage",
        "set parallel.layers_per_stage=null",
    ),
    "a cut without numbers": (
        4,
        {"parallel.layers_per_stage": []},
        "parallel.layers_per_stage",
        "set parallel.layers_per_stage=null",
    ),
    "an inner chunk without layers": (
        4,
        {"parallel.chunks": 2, "parallel.layers_per_stage": [2, 1, 0, 1]},
        "parallel.layers_per_stage",
        "set parallel.layers_per_stage=null",
    ),
    "a sequence that tensor ranks do not divide": (
        4,
        {"parallel.tensor": 2, "parallel.sequence": True, "data.sequence_length": 255},
        "data.sequence_length",
        "set data.sequence_length=256, or parallel.sequence=false",
    ),
    "a batch that replicas do not divide": (
        4,
        {"data.global_batch": 12},
        "data.global_batch",
        "set data.global_batch=16, or data.micro_batch=2",
    ),
    "a batch that fewer replicas divide": (
        12,
        {"data.global_batch": 16},
        "data.global_batch",
        "set data.global_batch=24, or start 8 ranks and keep the batch",
    ),
    "fewer micro-batches than stages": (
        4,
        {"parallel.chunks": 2, "data.global_batch": 8},
        "data.global_batch",
        "set data.global_batch=16",
    ),
    "a schedule without a pipeline": (
        4,
        {"parallel.pipeline": 1, "parallel.schedule": "zb_h1"},
        "parallel.schedule",
        "set parallel.schedule=auto, or parallel.pipeline",
    ),
    "chunks in 1F1B": (
        4,
        {"parallel.chunks": 2, "parallel.schedule": "1f1b"},
        "parallel.chunks",
        "set parallel.chunks=1, or parallel.schedule=auto",
    ),
    "chunks in ZB-H1": (
        4,
        {"parallel.chunks": 2, "parallel.schedule": "zb_h1"},
        "parallel.chunks",
        "set parallel.chunks=1, or parallel.schedule=auto",
    ),
    "nothing to interleave": (
        4,
        {"parallel.schedule": "interleaved"},
        "parallel.chunks",
        "set parallel.chunks=2, or parallel.schedule=auto",
    ),
    "one chunk in a V": (
        4,
        {"parallel.schedule": "zb_v"},
        "parallel.chunks",
        "set parallel.chunks=2, or parallel.schedule=auto",
    ),
    "three chunks in a V": (
        4,
        {"parallel.schedule": "v_half", "parallel.chunks": 3, "model.layers": 6},
        "parallel.chunks",
        "set parallel.chunks=2, or parallel.schedule=auto",
    ),
    "a split backward pass with the gradients of autograd": (
        4,
        {"parallel.schedule": "zb_h1", "sharding.fused_gradients": False},
        "sharding.fused_gradients",
        "set sharding.fused_gradients=true",
    ),
    "gradients of autograd that shall wait": (
        4,
        {"parallel.waiting_weights": 1, "sharding.fused_gradients": False},
        "sharding.fused_gradients",
        "set sharding.fused_gradients=true",
    ),
    "a split backward pass in compiled layers": (
        4,
        {"parallel.waiting_weights": 2, "kernels": "compiled"},
        "kernels",
        "set kernels=auto",
    ),
    "a larger vocabulary than the embedding has rows": (
        4,
        {"data.vocabulary": 5000},
        "data.vocabulary",
        "set model.vocabulary=5000 or data.vocabulary=4096",
    ),
    "an odd number of rotated dimensions": (
        4,
        {"model.positions": "rotary", "model.head_dim": 9},
        "model.head_dim",
        "set model.head_dim=10",
    ),
    "no rotated dimension": (
        4,
        {"model.positions": "rotary", "model.rotary_fraction": 0.01},
        "model.head_dim",
        "set model.head_dim=200",
    ),
    "next to no rotated dimension": (
        4,
        {"model.positions": "rotary", "model.rotary_fraction": 1e-12},
        "model.head_dim",
        "set model.head_dim=2000000000000, or another model.rotary_fraction",
    ),
    "a rotated dimension too many": (
        4,
        {"model.positions": "rotary", "model.head_dim": 19, "model.rotary_fraction": 0.7},
        "model.head_dim",
        "set model.head_dim=20",
    ),
    "a rate that would rise": (
        4,
        {"optimizer.minimum_learning_rate": 0.1},
        "optimizer.minimum_learning_rate",
        "set optimizer.minimum_learning_rate=0.003 or less",
    ),
    "two lengths of a cooldown": (
        4,
        {
            "optimizer.schedule": "wsd",
            "optimizer.cooldown_steps": 10,
            "optimizer.cooldown_share": 0.1,
        },
        "optimizer.cooldown_share",
        "set optimizer.cooldown_share=null",
    ),
    "a cooldown longer than the run": (
        4,
        {"optimizer.schedule": "wsd", "optimizer.cooldown_steps": 101},
        "optimizer.cooldown_steps",
        "set optimizer.cooldown_steps=80",
    ),
    "a cooldown that begins in the warm-up": (
        4,
        {"optimizer.schedule": "wsd", "optimizer.warmup_steps": 90},
        "optimizer.cooldown_share",
        "set optimizer.cooldown_steps=10",
    ),
    "an inverse square root from the first step": (
        4,
        {"optimizer.schedule": "inverse_sqrt", "optimizer.warmup_steps": 0},
        "optimizer.timescale_steps",
        "set optimizer.timescale_steps=10000",
    ),
    "a rate that falls during the warm-up": (
        4,
        {"optimizer.schedule": "inverse_sqrt", "optimizer.timescale_steps": 5},
        "optimizer.timescale_steps",
        "set optimizer.timescale_steps=20",
    ),
    "a measured choice in a run that shall repeat exactly": (
        4,
        {"trainer.deterministic": True, "kernels": "fastest"},
        "kernels",
        "set kernels=auto, elementwise or compiled",
    ),
    "a text corpus without a path": (
        4,
        {"data.kind": "text"},
        "data.path",
        "set data.path=FILE",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_cannot_be_laid_out_is_refused_by_its_key(defaults, wrong):
    ranks, changes, key, todo = REFUSED[wrong]
    refusal = _refusal(_changed(defaults, changes), ranks)
    assert refusal.key == key
    assert refusal.todo.startswith(todo)
    assert refusal.exit_code == 2


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_a_refusal_says_to_do_passes(defaults, wrong):
    ranks, changes, _, _ = REFUSED[wrong]
    values = _changed(defaults, changes)
    todo = _refusal(values, ranks).todo
    values, ranks = _advised(values, ranks, todo)
    check(decode(values), ranks)


def test_an_encoder_decoder_with_cut_samples_is_refused():
    values = _changed(compose(["model=mt5_tiny", "data=stdlib_spans"]), CUT)
    refusal = _refusal(values, 4)
    assert refusal.key == "model.kind"
    assert refusal.got == "t5, with parallel.context=2"
    assert "keys of all ranks" in refusal.wants
    values, ranks = _advised(values, 4, refusal.todo)
    check(decode(values), ranks)
    assert values["parallel"]["context"] == 1


def test_what_it_got_is_said_with_what_it_depends_on(defaults):
    values = _changed(defaults, {"parallel.pipeline": 4})
    assert str(_refusal(values, 6)) == (
        "configuration error at parallel.tensor x parallel.pipeline\n"
        "  got:    1 x 4 = 4 on 6 ranks\n"
        "  wants:  a product that divides the number of ranks; the quotient is the number of "
        "replicas\n"
        "  do:     start 8 ranks (launch.ranks=8 on one machine), or choose factors of 6: "
        "1, 2, 3, 6, or set parallel.pipeline=3"
    )


def test_the_first_rule_that_fails_is_the_one_to_mend_first(defaults):
    """The batch depends on the number of replicas, which depends on the ranks."""
    values = _changed(defaults, {"parallel.pipeline": 4, "data.global_batch": 7})
    assert _refusal(values, 6).key == "parallel.tensor x parallel.pipeline"
    assert _refusal(values, 8).key == "data.global_batch"


def test_a_head_width_that_is_given_need_not_fit_the_width(defaults):
    config = decode(_changed(defaults, {"model.hidden": 255, "model.head_dim": 32}))
    check(config, 4)
    assert (config.model.hidden, config.model.head_dim) == (255, 32)


def test_a_node_may_be_larger_than_the_run(defaults):
    config = decode(_changed(defaults, {"launch.ranks_per_node": 64}))
    assert ResolvedLayout.resolve(config, 4, 64).grid.node(3) == 0


def test_an_uneven_cut_is_accepted_as_given(defaults):
    config = decode(_changed(defaults, {"parallel.layers_per_stage": [3, 1]}))
    chunks = ResolvedLayout.resolve(config, 4, 4).model_chunks
    assert [len(chunk.layers) for chunk in chunks] == [3, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.chunks": 2, "data.global_batch": 24},  # 3 micro-batches on 2 stages
        {"parallel.pipeline": 1, "parallel.schedule": "1f1b"},
        {"parallel.schedule": "1f1b", "parallel.waiting_weights": 0, "kernels": "compiled"},
        {"sharding.fused_gradients": False, "kernels": "compiled"},
        *({"parallel.schedule": name, "parallel.chunks": 2} for name in ("zb_v", "v_half")),
    ],
)
def test_schedules_that_fit_are_accepted(defaults, changes):
    check(decode(_changed(defaults, changes)), 4)


def test_chunks_without_a_pipeline_are_refused_before_the_schedule_they_choose(defaults):
    changes = {"parallel.pipeline": 1, "parallel.chunks": 2, "parallel.schedule": "interleaved"}
    assert _refusal(_changed(defaults, changes), 4).todo.startswith("set parallel.chunks=1")


@pytest.mark.parametrize(("rows", "is_enough"), [(FIXED_PIECES, False), (FIXED_PIECES + 1, True)])
def test_no_vocabulary_is_advised_that_cannot_be_trained(defaults, rows, is_enough):
    todo = _refusal(_changed(defaults, {"model.vocabulary": rows}), 4).todo
    assert (f"data.vocabulary={rows}" in todo) == is_enough


def test_what_remains_is_data_parallelism(defaults):
    config = decode(_changed(defaults, {"parallel.tensor": 2, "parallel.pipeline": 4}))
    assert data_size(config, 64) == 8


@pytest.mark.parametrize(
    "ranks", [[8], [None, None], [4, 2, None], [4, 4, None], [None, 8], [2, None, 8, None]]
)
def test_links_out_of_order_are_refused(defaults, ranks):
    link = defaults["cluster"]["links"][0]
    links = [{**link, "ranks": number} for number in ranks]
    refusal = _refusal(_changed(defaults, {"cluster.links": links}), 4)
    assert refusal.key == "cluster.links"
    assert "null" in refusal.wants
    assert refusal.todo.endswith("conf/cluster/cpu_laptop.yaml")


def test_a_device_name_that_is_no_regular_expression_is_refused(defaults):
    with pytest.raises(ConfigError) as caught:
        decode(_changed(defaults, {"cluster.device.name_pattern": "A100("}))
    assert caught.value.key == "cluster.device.name_pattern"
    assert "not a regular expression" in caught.value.wants
