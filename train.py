"""Train a GPT model: `python train.py [key=value ...]`, see `python train.py --help`.

The door of the program. It composes and checks the configuration before anything slow is
imported, and then either starts the ranks on this machine or is one of them. What a rank does is
in frontier_llm/trainer/assemble.py.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from frontier_llm.config import RunConfig, decode
from frontier_llm.config.rules import check
from frontier_llm.errors import FrontierError
from frontier_llm.geometry.layout import make_grid, resolve_factors
from frontier_llm.parallel import failure
from frontier_llm.parallel.agreement import made_once, run_and_leave
from frontier_llm.parallel.cores import prepare_environment, share
from frontier_llm.parallel.launcher import INTERRUPTED, Launch, launch
from frontier_llm.parallel.rank import report, run_rank
from frontier_llm.parallel.stop import StopFlag
from frontier_llm.parallel.world import World, make_store
from frontier_llm.trainer import run_directory
from tools.compose import compose
from tools.help import help_text

PRINT = {"--cfg", "--cfg=job"}
"""Print the composed configuration (`--cfg job`, as hydra's programs have it) and stop."""
MEETING_TIMEOUT = timedelta(minutes=5)
"""Under srun, nodes may start minutes apart."""
CORPUS_TIMEOUT = timedelta(hours=4)
"""For rank 0 to tokenise a corpus while the others wait."""


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit code of the process."""
    try:
        if {"--help", "-h"} & set(arguments):
            print(help_text())
            return 0
        if PRINT & set(arguments):
            overrides = [argument for argument in arguments if argument not in {*PRINT, "job"}]
            print(run_directory.to_yaml(compose(overrides)), end="")
            return 0
        world = World.from_environment(os.environ)
        return train_here(arguments) if world is None else train_as_rank(world, arguments)
    except FrontierError as error:
        print(error, file=sys.stderr, end="\n" if str(error) else "")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def train_here(overrides: Sequence[str]) -> int:
    """Start `launch.ranks` processes on this machine and wait for them."""
    text = configure(overrides)
    config = decode(run_directory.from_yaml(text))
    threads = config.launch.threads or share(config.launch.ranks, os.environ)
    prepare_environment(threads, os.environ)
    quieten_libraries()
    import torch

    torch.set_num_threads(1)  # a parent with a pool of threads must not fork; see the launcher
    begin(config, text)
    from frontier_llm.trainer.assemble import run  # once, here: the ranks fork with it

    what = Launch(
        ranks=config.launch.ranks,
        failure_dir=failures(config),
        ranks_per_node=config.launch.ranks_per_node,
        port=config.launch.port,
        threads=threads,
        store_timeout=timedelta(seconds=config.launch.timeout_seconds),
    )
    return launch(partial(run, config), what)


def train_as_rank(world: World, overrides: Sequence[str]) -> int:
    """Be one rank of srun or torchrun; rank 0 alone composes, and tells the others."""
    prepare_environment(share(world.ranks_per_node, os.environ), os.environ)
    quieten_libraries()
    StopFlag.install()
    store = make_store(world, MEETING_TIMEOUT)
    text = made_once(
        world,
        store,
        "configuration",
        lambda: configure(overrides, world.size, world.ranks_per_node),
        MEETING_TIMEOUT,
    )
    config = decode(run_directory.from_yaml(text))
    made_once(world, store, "corpus", lambda: begin(config, text), CORPUS_TIMEOUT)

    def work() -> None:
        import torch

        if config.launch.threads:
            torch.set_num_threads(config.launch.threads)
        from frontier_llm.trainer.assemble import run

        run_and_leave(
            partial(run, config), world.with_nodes_of(config.launch.ranks_per_node), store
        )

    code = run_rank(work, world.rank, failures(config))
    return report(world.rank, world.size, failures(config)) if code else 0


def configure(
    overrides: Sequence[str], world_size: int | None = None, ranks_per_node: int | None = None
) -> str:
    """Compose, check and claim the run directory; return the configuration as YAML."""
    values = compose(overrides)
    config = decode(values)
    size = world_size or config.launch.ranks
    check(config, size)
    per_node = config.launch.ranks_per_node or ranks_per_node or size
    resolve_factors(config, make_grid(config, size, per_node))
    run_directory.claim(Path(config.run.dir))
    return run_directory.to_yaml(values)


def begin(config: RunConfig, text: str) -> str:
    """Prepare the corpus and write the run directory; return the corpus's folder."""
    from rich.progress import Progress

    from frontier_llm.data.prepare import prepare

    # No refresher thread: this process may fork.
    with Progress(transient=True, auto_refresh=False) as bar:
        task = bar.add_task("corpus", total=1.0)

        def show(what: str, share_done: float) -> None:
            bar.update(task, description=what, completed=share_done, refresh=True)

        folder = prepare(config.data, show)
    run_directory.write_config(Path(config.run.dir), text)
    failure.clear(failures(config))
    return str(folder)


def quieten_libraries() -> None:
    """Drop what megatron says at every import about libraries that are choices here (kernels=)."""
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")


def failures(config: RunConfig) -> Path:
    """Return the folder where a failing rank leaves its traceback."""
    return Path(config.run.dir) / run_directory.FAILURES


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
