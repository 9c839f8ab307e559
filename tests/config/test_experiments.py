"""Every set-up of conf/ can be started by its user: it decodes, divides, fits, names sources."""

import re
import shlex

import pytest

from docs.generate.models_and_clusters_page import fullest_stage_bytes, models, resolved
from frontier_llm.cli.compose import groups
from frontier_llm.cli.experiments import Header, composed
from frontier_llm.cli.machine_defaults import OF_THIS_MACHINE
from frontier_llm.cli.package_files import CONF
from frontier_llm.config.rules import check
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.choice import choose
from frontier_llm.planner.estimate import estimate
from frontier_llm.units import GIB
from tests.covering import one_in

pytestmark = pytest.mark.slow

EXPERIMENTS = groups()["experiment"]
OWN = ("laptop_3d", "llama3_8b_32k", "llama3_8b_128k")
"""Experiments that repeat no published run."""
CLUSTERS = [name for name in groups()["cluster"] if name not in OF_THIS_MACHINE]


def _header(name):
    return Header.read(CONF / "experiment" / f"{name}.yaml")


def _nodes_and_ranks(run):
    """Read (nodes, ranks a node) from a command of srun or torchrun."""
    options = dict(w.removeprefix("--").split("=", 1) for w in shlex.split(run) if "--" in w)
    if run.startswith("srun"):
        return int(re.search(r"-N (\d+)", run)[1]), int(options["ntasks-per-node"])
    return int(options["nnodes"]), int(options["nproc-per-node"])


@pytest.mark.parametrize("name", one_in(4, models()))
def test_a_model_decodes_under_its_own_name(name):
    assert composed(f"model={name}").model.name == name


@pytest.mark.parametrize("name", one_in(2, EXPERIMENTS))
def test_an_experiment_can_be_laid_out_over_its_ranks(name):
    config = composed(f"experiment={name}")
    check(config, _header(name).ranks)
    assert config.model.hidden % config.model.heads == 0


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_command_of_an_experiment_starts_that_experiment_on_its_ranks(name):
    header, config = _header(name), composed(f"experiment={name}")
    assert shlex.split(header.run)[-1] == f"experiment={name}"
    if header.run.startswith("python"):
        assert config.launch.ranks == header.ranks
        return
    nodes, per_node = _nodes_and_ranks(header.run)
    assert nodes * per_node == header.ranks
    assert per_node == config.cluster.ranks_per_node


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tensor_parallelism_stays_inside_a_node(name):
    config = composed(f"experiment={name}")
    assert config.cluster.ranks_per_node % config.parallel.tensor == 0


@pytest.mark.parametrize("name", one_in(3, EXPERIMENTS))
def test_the_states_of_an_experiment_fit_its_devices(name):
    config = composed(f"experiment={name}")
    ranks = _header(name).ranks
    layout = resolved(choose(config, ranks, config.cluster.ranks_per_node), ranks)
    assert fullest_stage_bytes(layout) < 0.9 * config.cluster.device.memory_gib * GIB


@pytest.mark.parametrize("name", one_in(3, [n for n in EXPERIMENTS if n.startswith("amsp_")]))
def test_amsps_experiments_name_the_papers_factors_and_reach_its_mfu(name):
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    *paper, preset = re.search(
        r"# The paper's factors: \((\d+), (\d+), (\d+)\), with sharding=(\w+)", text
    ).groups()
    sharding = composed(f"experiment={name}", f"sharding={preset}").sharding
    assert (sharding.params, sharding.grads, sharding.optimizer) == tuple(map(int, paper))
    published = int(re.search(r"(\d+)% MFU at 1024 GPUs", text)[1])
    config = composed(f"experiment={name}")
    planned = estimate(Candidate.of(choose(config, 1024, 8), 1024, 8))
    assert not planned.refused
    assert planned.mfu > published / 100


@pytest.mark.parametrize("name", [n for n in EXPERIMENTS if n != "laptop_3d"])
def test_a_published_experiment_trains_as_the_frontier_scripts_do(name):
    optimizer = composed(f"experiment={name}").optimizer
    assert (optimizer.learning_rate, optimizer.minimum_learning_rate) == (6e-5, 6e-6)
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.95)
    assert (optimizer.weight_decay, optimizer.clip_norm) == (0.1, 1.0)


@pytest.mark.parametrize("name", [n for n in EXPERIMENTS if n not in OWN])
def test_a_published_experiment_names_its_source_and_its_factors(name):
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    assert re.search(r"arXiv:\d{4}\.\d{5}", _header(name).title)
    assert "# The paper's factors: (" in text


@pytest.mark.parametrize(
    ("model", "parameters", "tolerance"),
    [
        ("gpt_22b", 22.06e9, 1e-3),
        ("gpt_175b", 174.6e9, 1e-3),
        ("gpt_1t", 1.008e12, 1e-3),
        ("llama_7b", 6_738_415_616, 0),
        ("llama_13b", 13_015_864_320, 0),
        ("llama_30b", 32_528_943_616, 0),
        ("llama_70b", 68_976_648_192, 0),
        # sums of the released files, without the second copy of a tied table
        ("llama3_8b", 8_030_261_248, 0),
        ("llama3_70b", 70_553_706_496, 0),
        ("llama3_405b", 405_853_388_800, 0),
        ("mistral_7b", 7_241_732_096, 0),
        ("olmo2_7b", 7_298_617_344, 0),
        ("qwen3_0_6b", 751_632_384 - 151_936 * 1024, 0),
        ("qwen3_1_7b", 2_031_739_904 - 151_936 * 2048, 0),
        ("qwen3_4b", 4_022_468_096, 0),
        ("qwen3_8b", 8_190_735_360, 0),
        ("qwen3_14b", 14_768_307_200, 0),
        ("qwen3_32b", 32_762_123_264, 0),
        ("gemma2_2b", 2_614_341_888, 0),
        ("gemma2_9b", 9_241_705_984, 0),
        ("gemma2_27b", 27_227_128_320, 0),
        # transformers' text decoders of the released configurations
        ("gemma3_270m", 268_098_176, 0),
        ("gemma3_1b", 999_885_952, 0),
        ("gemma3_4b", 3_880_263_168, 0),
        ("gemma3_12b", 11_766_034_176, 0),
        ("gemma3_27b", 27_009_346_304, 0),
        ("mt5_small", 300_176_768, 0),
        ("mt5_base", 582_401_280, 0),
        ("t5gemma_s_s", 312_517_632, 0),
        ("t5gemma_b_b", 591_490_560, 0),
        ("t5gemma_l_l", 1_241_761_792, 0),
        ("t5gemma_ml_ml", 2_200_345_344, 0),
        ("t5gemma_xl_xl", 3_766_980_608, 0),
        ("t5gemma_2b_2b", 5_596_853_760, 0),
        ("t5gemma_9b_9b", 20_333_401_088, 0),
        ("t5gemma_9b_2b", 12_292_375_296, 0),
        # transformers' models of the released configurations, without those for images
        ("t5gemma2_270m_270m", 368_424_192, 0),
        ("t5gemma2_1b_1b", 1_697_782_016, 0),
        ("t5gemma2_4b_4b", 7_089_110_016, 0),
        ("mt5_large", 1_229_581_312, 0),
        ("mt5_xl", 3_742_619_648, 0),
        ("mt5_xxl", 12_921_057_280, 0),
        # BLOOM-3B's own count; it also normalises the embedding, and we learn positions
        ("gpt_3b", 3_002_557_440 - 2 * 2560 + 2048 * 2560, 0),
    ],
)
def test_a_model_has_its_published_number_of_parameters(model, parameters, tolerance):
    counted = count_parameters(composed(f"model={model}").model, 2048)
    assert counted == pytest.approx(parameters, rel=tolerance)


@pytest.mark.parametrize(
    ("model", "billions"),
    [("0_6b", 0.44), ("1_7b", 1.4), ("4b", 3.6), ("8b", 6.95), ("14b", 13.2), ("32b", 31.2)],
)
def test_qwen_3_has_the_parameters_of_its_model_card_outside_of_tables(model, billions):
    config = composed(f"model=qwen3_{model}").model
    tables = config.vocabulary * config.hidden * (1 if config.tied else 2)
    assert count_parameters(config, 2048) - tables == pytest.approx(billions * 1e9, rel=1e-2)


@pytest.mark.parametrize("name", [n for n in models() if n.startswith("megatron_")])
def test_megatrons_models_have_the_size_of_their_names_to_the_last_digit(name):
    billions = name.removeprefix("megatron_").removesuffix("b").replace("_", ".")
    decimals = len(billions.partition(".")[2])
    counted = count_parameters(composed(f"model={name}").model, 2048)
    assert f"{counted / 1e9:.{decimals}f}" == billions


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_names_a_source_for_every_block(name):
    cluster = composed(f"cluster={name}").cluster
    assert cluster.name == name
    for part in (cluster.device, cluster.host, *cluster.links, *cluster.storage):
        assert len(part.source) > 10, part


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_clusters_links_get_slower_and_end_with_the_whole_machine(name):
    cluster = composed(f"cluster={name}").cluster
    speeds = [link.gb_per_second for link in cluster.links]
    assert speeds == sorted(speeds, reverse=True)
    assert cluster.links[-1].ranks is None
    if len(cluster.links) > 1:
        assert cluster.links[-2].ranks == cluster.ranks_per_node


@pytest.mark.parametrize(
    ("device", "cluster"),
    [
        ("cpu", "cpu_laptop"),
        ("AMD Instinct MI250X", "frontier_mi250x lumi_mi250x"),
        ("NVIDIA A100-SXM4-80GB", "a100_80g a100_80g_4x100gb"),
        ("NVIDIA A800-SXM4-80GB", "a800_amsp"),
        ("NVIDIA A100-SXM-64GB", "leonardo_a100_64g"),
        (
            "NVIDIA A100-SXM4-40GB",
            "a100_40g_8 juwels_a100_40g perlmutter_a100_40g polaris_a100_40g",
        ),
        ("Tesla V100-SXM3-32GB", "dgx2_v100"),
        ("NVIDIA H200", "h200_8"),
        ("NVIDIA H100 80GB HBM3", "h100_8"),
        ("AMD Instinct MI300X OAM", "mi300x_8"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 PCIe", None),
        ("AMD Instinct MI300A", None),
    ],
)
def test_a_drivers_name_is_recognised_by_the_clusters_with_this_device_alone(device, cluster):
    clusters = [composed(f"cluster={name}").cluster for name in CLUSTERS]
    found = [c.name for c in clusters if re.search(c.device.name_pattern, device)]
    assert found == (cluster.split() if cluster else [])


def test_an_unknown_peak_is_absent_not_zero():
    for name in CLUSTERS:
        peaks = composed(f"cluster={name}").cluster.device.peak_tflops
        assert all(peak > 0 for peak in peaks.values())
    assert composed("cluster=cpu_laptop").cluster.device.peak_tflops == {}
    assert "bf16" not in composed("cluster=dgx2_v100").cluster.device.peak_tflops
