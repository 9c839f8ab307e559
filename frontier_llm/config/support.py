"""Refuse number formats that cannot be combined.

The page docs/collectives.md shows which can be (docs/generate/collectives_page.py asks
`check_support`), and tests/trainer/test_support.py trains with them.
"""

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import refuse

FEEDBACK = "collectives.error_feedback"


def check_support(config: RunConfig) -> None:
    """Refuse a configuration that combines number formats that do not work together."""
    collectives, precision = config.collectives, config.precision.name
    run, block = collectives.rotation_elements, collectives.block_elements
    between_nodes = collectives.grads_formats[-1], collectives.sums_formats[-1]
    has_errors = any(name.startswith("int") for name in between_nodes)
    refuse(
        (run and (run < 16 or run & (run - 1) or (block != run and block % (2 * run))),
         "collectives.rotation_elements", f"{run}, with collectives.block_elements={block}",
         "0, or a power of two from 16 that is block_elements or divides half of it",
         "set collectives.rotation_elements=16"),
        (collectives.refresh_differences and not collectives.refresh_format.startswith("int"),
         "collectives.refresh_format",
         f"{collectives.refresh_format}, with collectives.refresh_differences=true",
         "int8 or int4, because differences are sent as integers",
         "set collectives.refresh_format=int4, or collectives.refresh_differences=false"),
        (collectives.error_feedback and precision == "fp16", FEEDBACK,
         "true, with precision=fp16",
         "false in fp16, because kept errors contain the loss scale, which changes between steps",
         "set collectives.error_feedback=false, or precision=bf16"),
        (collectives.error_feedback and not has_errors, FEEDBACK,
         f"true, with {' and '.join(dict.fromkeys(between_nodes))} between nodes",
         "gradients in int8 or int4 between nodes, because other formats have no error to keep",
         "set collectives.grads_across_format=int4, or collectives.error_feedback=false"),
    )  # fmt: skip
