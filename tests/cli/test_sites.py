"""The files of each site: environment scripts, job scripts and cluster files.

Programs of a site are stubs. `module` sets what the site's page says that its modules set.
"""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from frontier_llm.cli.package_files import CONF
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.device import identity

ROOT = Path(__file__).parents[2]
OLCF = "docs.olcf.ornl.gov PyTorch on Frontier", "2026-07-22"
HPE = "HewlettPackard/shs-ccl-docs", "2026-11-26"
ALCF = "docs.alcf.anl.gov Polaris NCCL", "2024-10-29"
NERSC = "NERSC/podman-hpc etc/modules.d/nccl.yaml", "2026-11-26"
AI_GUIDE = "Lumi-supercomputer/LUMI-AI-Guide 05", "2026-05-04"
NCCL = "docs.nvidia.com NCCL Environment Variables", "2026-11-26"
ITWINAI = "interTwin-eu/itwinai juwels.sh", "2026-11-26"
PLUGIN = "aws/aws-ofi-nccl#530", "2024-08-15"
INDUCTOR = "pytorch/pytorch#191385", "2026-07-28"
UNVERIFIED = "unverified", ""
OURS = "ours: a folder, a file or a number of cores", ""

COMMON = {
    "NCCL_DEBUG": ("WARN", NCCL),
    "TORCHINDUCTOR_COMPILE_THREADS": ("1", INDUCTOR),
    "FRONTIER_LLM_NODE_LOCAL": ("/tmp/frontier_llm-me", OURS),
    "TRITON_CACHE_DIR": ("/tmp/frontier_llm-me/triton", OURS),
    "FRONTIER_LLM_ARCHIVE": (f"{ROOT}/venv.tar", OURS),
}
SLINGSHOT = {
    **COMMON,
    "NCCL_SOCKET_IFNAME": ("hsn0,hsn1,hsn2,hsn3", HPE),
    "GLOO_SOCKET_IFNAME": ("hsn0", OURS),
    "NCCL_CROSS_NIC": ("1", HPE),
    "FI_MR_CACHE_MONITOR": ("userfaultfd", HPE),
    "FI_CXI_DISABLE_HOST_REGISTER": ("1", HPE),
    "FI_CXI_DEFAULT_CQ_SIZE": ("131072", HPE),
    "FI_CXI_DEFAULT_TX_SIZE": ("2048", HPE),
    "FI_CXI_RX_MATCH_MODE": ("hybrid", HPE),
    "NCCL_NET": ("AWS Libfabric", PLUGIN),
}
MIOPEN = {
    "MIOPEN_USER_DB_PATH": ("/tmp/miopen-me", AI_GUIDE),
    "MIOPEN_CUSTOM_CACHE_DIR": ("/tmp/miopen-me", AI_GUIDE),
}
INFINIBAND = {**COMMON, "NCCL_NET": ("IB", NCCL)}
LIBRARIES = "/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib:/soft/libraries/hwloc/lib"
EXPORTED = {
    "frontier": {
        **SLINGSHOT, **MIOPEN,
        "LD_LIBRARY_PATH": ("/cray", OLCF),
        "NCCL_NET": ("OFI", OLCF),
        "NCCL_NET_GDR_LEVEL": ("PHB", OLCF),
        "HSA_FORCE_FINE_GRAIN_PCIE": ("1", OLCF),
        "FI_MR_CACHE_MONITOR": ("kdreg2", OLCF),
        "FI_CXI_RDZV_PROTO": ("alt_read", OLCF),
        "FI_CXI_RDZV_EAGER_SIZE": ("0", OLCF),
        "FI_CXI_RDZV_THRESHOLD": ("0", OLCF),
        "FI_CXI_RDZV_GET_MIN": ("0", OLCF),
        "FRONTIER_LLM_NODE_LOCAL": ("/mnt/bb/me", OLCF),
        "TRITON_CACHE_DIR": ("/mnt/bb/me/triton", OURS),
    },
    "lumi": {**SLINGSHOT, **MIOPEN, "HSA_FORCE_FINE_GRAIN_PCIE": ("1", HPE)},
    "perlmutter": {
        **SLINGSHOT,
        "NCCL_SOCKET_IFNAME": ("hsn", NERSC),
        "NCCL_NET_GDR_LEVEL": ("PHB", NERSC),
    },
    "polaris": {
        **SLINGSHOT,
        "LD_LIBRARY_PATH": (LIBRARIES, ALCF),
        "NCCL_SOCKET_IFNAME": ("hsn", UNVERIFIED),
        "NCCL_NET_GDR_LEVEL": ("PHB", ALCF),
        "NCCL_COLLNET_ENABLE": ("1", ALCF),
        "OMP_NUM_THREADS": ("8", OURS),
        "FRONTIER_LLM_NODE_LOCAL": ("/local/scratch/frontier_llm-me", OURS),
        "TRITON_CACHE_DIR": ("/local/scratch/frontier_llm-me/triton", OURS),
    },
    "leonardo": {
        **INFINIBAND,
        "NCCL_SOCKET_IFNAME": ("ib0", UNVERIFIED),
        "GLOO_SOCKET_IFNAME": ("ib0", UNVERIFIED),
    },
    "juwels": {
        **INFINIBAND,
        "NCCL_SOCKET_IFNAME": ("ib0", ITWINAI),
        "GLOO_SOCKET_IFNAME": ("ib0", ITWINAI),
        "MASTER_ADDR": ("jwb0001i", ITWINAI),
    },
    "a100": {**COMMON, "NCCL_NET_GDR_LEVEL": ("PHB", NCCL)},
}  # fmt: skip
"""The variables that each site's file exports: value, source and date."""
CLUSTERS = {
    "frontier": "frontier_mi250x", "lumi": "lumi_mi250x", "perlmutter": "perlmutter_a100_40g",
    "polaris": "polaris_a100_40g", "leonardo": "leonardo_a100_64g", "juwels": "juwels_a100_40g",
    "a100": "a100_80g",
}  # fmt: skip
NOT_COMPARED = ("FRONTIER_LLM_", "MIOPEN_", "TRITON_", "LD_LIBRARY_PATH", "MASTER_", "OMP_")
"""Variables that differ between users or jobs, so that the cluster file does not name them."""
MODULE = """module() {
  for name in "$@"; do case $name in
    cpe/*) export CRAY_LD_LIBRARY_PATH=/cray ;;
    rccl-net-plugin) export FI_CXI_RDZV_PROTO=alt_read NCCL_NET_PLUGIN=/opt/librccl-net.so ;;
  esac; done
}
export -f module
"""
SLURM = sorted(site for site in EXPORTED if site != "polaris")


def job_environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a job on two nodes, with the stubs of `folder` on the path."""
    (folder / "nodes").write_text("x1\nx1\nx2\n")
    return {
        "PATH": f"{folder}:{os.environ['PATH']}", "USER": "me", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "jwb[0001-0002]", "PBS_NODEFILE": str(folder / "nodes"), **more,
    }  # fmt: skip


def stub(folder: Path, name: str, text: str) -> None:
    """Write a program that takes the place of one of the site."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run_bash(script: str, environment: dict[str, str]) -> str:
    """Run a bash script in the repository; return its output."""
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def exported_by(site: str, folder: Path, **more: str) -> dict[str, str]:
    """Return the variables that a site's file adds to the environment of a job."""
    stub(folder, "scontrol", "printf 'jwb0001\\njwb0002\\n'")
    environment = job_environment(folder, **more)
    text = run_bash(f"{MODULE} source scripts/{site}_env.sh; env", environment)
    found = dict(re.findall(r"^([A-Z]\w*)=(.*)$", text, re.MULTILINE))
    by_bash_or_modules = {"PWD", "SHLVL", "CRAY_LD_LIBRARY_PATH", "NCCL_NET_PLUGIN"}
    random = {"FRONTIER_LLM_SECRET"}  # tests/launch/test_world.py
    return {
        name: value for name, value in found.items()
        if environment.get(name) != value and name not in by_bash_or_modules | random
    }  # fmt: skip


def cluster(site: str) -> ClusterConfig:
    """Return the cluster file of a site, checked by its class."""
    text = (CONF / "cluster" / f"{CLUSTERS[site]}.yaml").read_text()
    return ClusterConfig.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize("site", EXPORTED)
def test_a_site_exports_what_its_sources_name(site, tmp_path):
    wanted = {name: value for name, (value, _) in EXPORTED[site].items()}
    assert exported_by(site, tmp_path) == wanted


@pytest.mark.parametrize("site", EXPORTED)
def test_the_cluster_file_wants_what_the_script_exports(site, tmp_path):
    exported = exported_by(site, tmp_path)
    compared = {k: v for k, v in exported.items() if not k.startswith(NOT_COMPARED)}
    assert cluster(site).environment == compared


@pytest.mark.parametrize("site", EXPORTED)
def test_every_rank_reports_what_a_site_sets(site):
    wanted = {name: "" for name in EXPORTED[site] if not name.startswith(("FRONTIER_LLM_", "LD_"))}
    assert identity.variables(wanted, ()) == wanted


@pytest.mark.parametrize("site", EXPORTED)
def test_an_alternative_differs_from_the_environment(site):
    for alternative in cluster(site).environment_alternatives:
        for name, value in alternative.variables.items():
            assert cluster(site).environment.get(name) != value


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*_env.sh")), ids=lambda p: p.name)
def test_every_variable_has_a_reason_and_the_file_its_sources(path):
    lines = path.read_text().splitlines()
    assert re.search(r"^# Sources?\b.*", path.read_text(), re.MULTILINE)
    assert re.search(r"20\d\d-\d\d", path.read_text())
    for index, line in enumerate(lines):
        if line.startswith("export "):
            above = next(x for x in reversed(lines[:index]) if not x.startswith(("export", "lib")))
            assert above.startswith("# ") or above.startswith("read -r"), line


@pytest.mark.parametrize("site", EXPORTED)
def test_what_is_set_before_the_job_stays(site, tmp_path):
    mine = {name: "mine, or 'so'" for name in EXPORTED[site] if name != "LD_LIBRARY_PATH"}
    changed = exported_by(site, tmp_path, **mine)
    assert set(changed) <= {"LD_LIBRARY_PATH"}


def test_a_modules_value_wins_over_ours(tmp_path):
    module = "module() { export FI_MR_CACHE_MONITOR=module; }"
    environment = job_environment(tmp_path)
    text = run_bash(f"{module}; source scripts/frontier_env.sh; env", environment)
    assert "FI_MR_CACHE_MONITOR=module" in text.splitlines()


@pytest.mark.parametrize("site", ["frontier", "lumi", "perlmutter"])
def test_one_node_does_not_insist_on_the_network(site, tmp_path):
    assert "NCCL_NET" not in exported_by(site, tmp_path, SLURM_JOB_NUM_NODES="1")


# The job scripts


def submit(site: str, folder: Path, *overrides: str) -> tuple[list[str], list[str]]:
    """Run a site's job script with stubs; return the ranks' launch command, and a rank's output."""
    calls = folder / "calls"
    start_rank = (
        f'printf "%s\\n" "$@" > {calls}\n'
        f'printf "%s\\n" "$*" >> {folder}/steps\n'
        "while [[ ! $1 =~ ^(bash|mkdir|tar|rm)$ && $1 != /* ]]; do shift; done\n"
        "[[ $1 =~ ^(mkdir|tar|rm)$ ]] && exit 0\n"
        'SLURM_LOCALID=5 PMI_RANK=7 PMI_LOCAL_RANK=3 exec "$@"'
    )
    for program in ("srun", "mpiexec"):
        stub(folder, program, start_rank)
    stub(folder, "sbcast", "exit 0")
    stub(folder, "scontrol", "printf 'jwb0001\\njwb0002\\n'")
    stub(folder, ".venv/bin/python", 'env; printf "%s\\n" "$@"')
    environment = job_environment(
        folder, SLURM_SUBMIT_DIR=str(ROOT), SLURM_CPUS_PER_TASK="7", SLURM_JOB_NAME="name",
        SLURM_JOB_ID="11", PBS_O_WORKDIR=str(ROOT), PBS_JOBID="11.polaris",
        FRONTIER_LLM_NODE_LOCAL=str(folder),
    )  # fmt: skip
    name = "polaris.pbs" if site == "polaris" else f"{site}.sbatch"
    words = " ".join(overrides)
    output = run_bash(f"{MODULE} bash scripts/{name} {words}", environment)
    return calls.read_text().splitlines(), output.splitlines()


@pytest.mark.parametrize("site", EXPORTED)
def test_a_job_script_starts_ranks_with_its_arguments(site, tmp_path):
    command, output = submit(site, tmp_path, "experiment=x", "trainer.steps=3")
    job = "frontier_llm" if site == "polaris" else "name"
    words = ["-m", "frontier_llm", "train", f"run.dir=runs/{job}-11", "run.resume=auto"]
    assert output[-len(words) - 2 :] == [*words, "experiment=x", "trainer.steps=3"]
    assert command[-len(words) - 3] == f"{tmp_path}/.venv/bin/python"
    steps = (tmp_path / "steps").read_text().splitlines()
    deletes = [step.endswith(f" rm --force {tmp_path}/venv.tar") for step in steps]
    assert any(deletes) == (site != "polaris"), "a node's copy of the archive stays"


@pytest.mark.parametrize(
    ("site", "options"),
    [
        ("frontier", ["--gpus-per-task=1", "--gpu-bind=closest"]),
        ("juwels", ["--threads-per-core=1"]),
        ("polaris", ["-n", "8", "--ppn", "4", "--cpu-bind", "none"]),
        ("a100", ["--distribution=block", "--cpus-per-task=7"]),
    ],
)
def test_a_launch_command_binds_as_the_site_says(site, options, tmp_path):
    command, _ = submit(site, tmp_path)
    start = command.index(options[0])
    assert command[start : start + len(options)] == options


def test_a_rank_of_lumi_has_one_device_and_near_cores(tmp_path):
    command, output = submit("lumi", tmp_path)
    assert "ROCR_VISIBLE_DEVICES=5" in output
    assert not any(word.startswith("--gpus-per-task") for word in command)
    masks = next(word for word in command if word.startswith("--cpu-bind=mask_cpu:"))
    cores = [
        {core for core in range(64) if int(mask, 16) >> core & 1}
        for mask in masks.removeprefix("--cpu-bind=mask_cpu:").split(",")
    ]
    # rocm-smi --showtoponuma on LUMI's page; a NUMA domain has 16 cores
    assert [{core // 16 for core in rank} for rank in cores] == [
        {n} for n in (3, 3, 1, 1, 0, 0, 2, 2)
    ]
    assert len(set.union(*cores)) == 56
    assert not any(core % 8 == 0 for rank in cores for core in rank)


def test_a_rank_of_polaris_has_the_variables_of_torchrun(tmp_path):
    _, output = submit("polaris", tmp_path)
    wanted = {
        "RANK": 7,
        "LOCAL_RANK": 3,
        "WORLD_SIZE": 8,
        "LOCAL_WORLD_SIZE": 4,
        "MASTER_ADDR": "x1",
    }
    assert {f"{name}={value}" for name, value in wanted.items()} <= set(output)


def test_a_rank_runs_on_the_cores_next_to_its_gpu(tmp_path):
    stub(tmp_path, "nvidia-smi", '[ "$1" = --id=5 ] && echo 00000000:C7:00.0')
    listed = "/sys/bus/pci/devices/0000:c7:00.0/local_cpulist"
    stub(tmp_path, "cat", f'[ "$1" = {listed} ] && echo 80-95,208-223')
    stub(tmp_path, "taskset", f'echo "$@" > {tmp_path}/bound')
    environment = job_environment(tmp_path, SLURM_LOCALID="5")
    assert run_bash("bash scripts/near_gpu.sh echo 'a  b'", environment) == "a  b\n"
    assert (tmp_path / "bound").read_text().startswith("--cpu-list --pid 80-95,208-223 ")


def test_a_rank_without_a_gpu_starts_as_it_is(tmp_path):
    stub(tmp_path, "nvidia-smi", "exit 9")
    stub(tmp_path, "taskset", f"touch {tmp_path}/bound")
    assert run_bash("bash scripts/near_gpu.sh echo here", job_environment(tmp_path)) == "here\n"
    assert not (tmp_path / "bound").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").iterdir()), ids=lambda path: path.name)
def test_bash_can_read_a_script(path):
    subprocess.run(["bash", "-n", path], check=True)
