"""`recovery.partner_copies` sets the node-local checkpoints, and refuses others."""

import pytest

from frontier_llm.cli.compose import compose
from frontier_llm.config import RunConfig, decode
from frontier_llm.config.partner_copies import KEPT
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.host_pool import copied_bytes

WANTED = "recovery.partner_copies=true"


def config(*overrides: str) -> RunConfig:
    return decode(compose(overrides))


def test_copies_are_node_local_checkpoints_of_every_step() -> None:
    checkpoint = config(WANTED).checkpoint
    local = checkpoint.tiers.local
    assert (local.path, local.every_steps, local.keep) == ("/dev/shm/frontier_llm-$UID", 1, KEPT)
    assert checkpoint.has_partner
    assert config().checkpoint.tiers.local.path is None


def test_a_configuration_that_was_written_is_read_again() -> None:
    written = config(WANTED, "recovery.copies_path=/run/copies")
    assert decode(written.model_dump(mode="json")) == written


@pytest.mark.parametrize(
    ("override", "todo"),
    [
        ("checkpoint.tiers.local.path=/mnt/nvme", "checkpoint.tiers.local.path=null"),
        ("checkpoint=blocking", "checkpoint=lazy"),
        ("checkpoint=off", "checkpoint=lazy"),
    ],
)
def test_other_node_local_checkpoints_are_refused(override: str, todo: str) -> None:
    with pytest.raises(ConfigError, match=r"recovery.partner_copies") as error:
        config(WANTED, override)
    assert todo in str(error.value)


def test_a_node_holds_the_kept_steps_and_the_one_being_written_twice() -> None:
    assert copied_bytes(config(WANTED), 1000) == 2 * (KEPT + 1) * 1000
    assert copied_bytes(config(), 1000) == 0
