"""Delete the files of old checkpoints that are kept for the next ones (checkpoint/spare_files)."""

from frontier_llm.checkpoint.spare_files import remove_spare
from frontier_llm.config.run import RunConfig
from frontier_llm.launch.world import World
from frontier_llm.trainer.checkpoint_places import local_root, shared_folder


def remove_spares(config: RunConfig, world: World) -> None:
    """Delete the spare folders of a run; no checkpoint may be under way.

    Args:
        config: configuration of the run.
        world: rank 0 deletes in the run directory, and the first rank of a node on its disk.
    """
    if world.rank == 0:
        remove_spare(shared_folder(config))
    root = local_root(config)
    if root is not None and root.is_dir() and world.rank == world.node_ranks.start:
        for folder in root.iterdir():
            remove_spare(folder)
