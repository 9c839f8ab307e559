"""Name the tables of measured runs in this folder. The first lines of each file name its source."""

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent


class Table(NamedTuple):
    """A table of measured runs."""

    title: str
    """Title for the documentation."""
    device: str
    """Device on which all its runs were measured."""
    fits: bool = True
    """Whether constants are fitted to it."""
    note: str = ""
    """Note for the documentation."""


TABLES = {
    "vtrain_single_node": Table("Megatron-LM on one node of A100 (vTrain)", "A100"),
    "llm_foundry_a100_40gb": Table("llm-foundry on A100-40GB", "A100"),
    "llm_foundry_h100_under_7b": Table("llm-foundry on H100, models under 7B", "H100"),
    "megatron_sc21": Table("Megatron-LM on A100 (SC'21)", "A100"),
    "amsp": Table("AMSP, ZeRO-1, MiCS and ZeRO-3 on A800", "A100"),
    "frontier": Table("Frontier (MI250X)", "MI250X"),
    "megatron_sc21_unused": Table(
        "Megatron-LM on A100 (SC'21), other rows", "A100", fits=False, note="never fitted"
    ),
    "amsp_zero3": Table(
        "ZeRO-3 and ZeRO++ on 1024 A800", "A100", fits=False, note="size of messages fitted to it"
    ),
}
"""The tables by the name of their file."""
