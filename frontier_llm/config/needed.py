"""The table of keys that have an effect only together with another setting.

`unused` finds the keys that the chosen files, modes and devices ignore. Commands refuse such a key
if the user has set it (frontier_llm/cli/compose.py). Files of conf/ may set it, because it
takes effect as soon as the other setting is chosen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from frontier_llm.config.optimizer import ENDING
from frontier_llm.config.run import RunConfig

SWEEP = "frontier-llm sweep"
"""The command that uses keys of trials."""


@dataclass(frozen=True)
class Need:
    """Keys of one section that need another setting."""

    section: str
    """Empty for keys without a section."""
    keys: str
    """Names of the keys in the section, separated by spaces."""
    setting: str
    """What to add to the command line, or the command itself. It may name keys in braces."""
    why: str
    is_met: Callable[[RunConfig], bool]

    @property
    def full_keys(self) -> tuple[str, ...]:
        """The dotted keys."""
        return tuple(f"{self.section}.{name}".lstrip(".") for name in self.keys.split())


def unused(config: RunConfig) -> Iterator[tuple[str, Need]]:
    """Yield the keys that have no effect in a configuration, each with what it needs."""
    for need in NEEDS:
        if not need.is_met(config):
            for key in need.full_keys:
                yield key, replace(need, setting=need.setting.format_map(dict(config)))


def _refreshes(config: RunConfig) -> bool:
    sharding = config.sharding
    return sharding.params != sharding.optimizer or sharding.params == "auto"


def _formats_of_gradients(config: RunConfig) -> tuple[str, ...]:
    collectives, sharding = config.collectives, config.sharding
    grads = () if sharding.optimizer == 1 else collectives.grads_formats
    return (*grads, *collectives.sums_formats)


def _is_quantised(config: RunConfig) -> bool:
    collectives, names = config.collectives, [*_formats_of_gradients(config)]
    if config.sharding.params != 1:
        names += [collectives.params_format, collectives.params_backward_format or ""]
    if _refreshes(config):
        names.append(collectives.refresh_format)
    return any(name.startswith("int") for name in names)


def _crosses_nodes(config: RunConfig) -> bool:
    return config.sharding.optimizer not in (1, "package", "node")


def _rounds_between_nodes(config: RunConfig) -> bool:
    collectives = config.collectives
    names = [collectives.sums_formats[-1]]
    names += [collectives.grads_formats[-1]] if _crosses_nodes(config) else []
    return any(name.startswith("int") for name in names)


def _stretches(config: RunConfig) -> bool:
    return config.model.positions == "rotary" and config.model.rotary_scaling != "none"


def _saves_locally(config: RunConfig) -> bool:
    return config.checkpoint.tiers.local.path is not None


def _is_watched(config: RunConfig) -> bool:
    return config.watchdog.enabled


def _is_confined(config: RunConfig) -> bool:
    model = config.model
    windows = {model.window, model.encoder_window}
    is_limited = windows != {None} or model.attention_softcap is not None
    return model.positions == "relative" or is_limited or config.data.documents == "separate"


def _is_on_gpu(config: RunConfig) -> bool:
    return config.cluster.device.kind != "cpu"


# fmt: off
NEEDS: tuple[Need, ...] = (
    Need("data", "path", "data=text", "the chosen corpus is not read from this path "
         "(data=text_spans for an encoder-decoder)", lambda c: c.data.kind == "text"),
    Need("data", "text_key format", "data=text", "the standard library is text",
         lambda c: any(corpus.kind == "text" for corpus in c.data.sources)),
    Need("data", "corpora blend_alpha", "data=blend", "one corpus has no shares",
         lambda c: c.data.kind == "blend"),
    Need("data", "text_key format vocabulary end_of_document validation_percent broken unique",
         "data.path=TEXT", "a prepared corpus stays as it is",
         lambda c: not all(corpus.is_prepared for corpus in c.data.sources)),
    Need("data", "vocabulary", "data.path=TEXT", "a prepared corpus has its own tokenizer",
         lambda c: not any(corpus.is_prepared for corpus in c.data.sources)),
    Need("data", "vocabulary", "data.tokenizer=null", "a given tokenizer has its own tokens",
         lambda c: c.data.tokenizer is None),
    Need("data", "end_of_document", "data.tokenizer=FILE", "a tokenizer that is trained on the "
         "corpus has its own token", lambda c: c.data.tokenizer is not None),
    Need("data", "denoisers decoder_length", "model=mt5_tiny data.objective=spans",
         "a decoder alone predicts the next token", lambda c: c.data.objective == "spans"),
    Need("data", "read_share", "data.documents=separate", "joined documents read each other",
         lambda c: c.data.documents == "separate"),
    Need("data", "workers", "data.prefetch=1", "without it the training loop reads the samples",
         lambda c: c.data.prefetch > 0),
    Need("model", "rotary_base rotary_fraction rotary_scaling", "model.positions=rotary",
         "other positions are not rotated", lambda c: c.model.positions == "rotary"),
    Need("model", "rotary_factor", "model.positions=rotary model.rotary_scaling=llama3",
         "no wavelengths are stretched", _stretches),
    Need("model", "rotary_original_length rotary_slow_turns rotary_fast_turns",
         "model.positions=rotary model.rotary_scaling=llama3",
         "no wavelengths are stretched by their turns",
         lambda c: _stretches(c) and c.model.rotary_scaling != "linear"),
    Need("model", "rotary_local_base", "model.positions=rotary model.window=TOKENS",
         "only rotated layers with a window use it",
         lambda c: c.model.positions == "rotary" and c.model.window is not None),
    Need("model", "zero_centred_norms", "model.norm=rmsnorm", "LayerNorm has no such form",
         lambda c: c.model.norm == "rmsnorm"),
    Need("model", "score_width", "model.scaled_attention=true", "scores are not divided",
         lambda c: c.model.scaled_attention),
    Need("model", "rotary_attention_factor", "model.positions=rotary model.rotary_scaling=yarn",
         "other scalings have no such factor",
         lambda c: _stretches(c) and c.model.rotary_scaling == "yarn"),
    Need("model", "relative_buckets relative_distance", "model=mt5_tiny",
         "only relative positions (of an encoder-decoder) have buckets",
         lambda c: c.model.positions == "relative"),
    Need("model", "cross_attention encoder_embedding encoder_window encoder_window_after "
         "start_token encoder_hidden encoder_heads encoder_kv_heads encoder_head_dim encoder_ffn",
         "model=mt5_tiny",
         "a GPT has no encoder", lambda c: c.model.kind == "t5"),
    Need("model", "encoder_hidden", "model.encoder_embedding=true", "both sides share an embedding",
         lambda c: c.model.encoder_embedding),
    Need("model", "encoder_window_after", "model.encoder_window=TOKENS",
         "the window is the same on both sides",
         lambda c: c.model.encoder_window is not None),
    Need("model", "window_every", "model.window=TOKENS", "without a window all layers are the same",
         lambda c: c.model.window is not None),
    Need("", "attention", "model.window=TOKENS", "flex is for windows, relative positions, capped "
         "scores and separate documents", _is_confined),
    Need("", "attention", "cluster=NAME of a machine with GPUs", "CPUs have no FlexAttention",
         _is_on_gpu),
    Need("parallel", "sequence", "parallel.tensor=2", "one tensor rank has the whole sequence",
         lambda c: c.parallel.tensor > 1),
    Need("parallel", "waiting_weights layers_per_stage", "parallel.pipeline=2",
         "one stage has all layers and never waits",
         lambda c: c.parallel.pipeline > 1),
    Need("sharding", "fused_gradients", "kernels=auto", "compiled layers never fuse gradients",
         lambda c: c.kernels != "compiled"),
    Need("collectives", "params_format params_backward_format", "sharding=zero3",
         "parameters that are not sharded (sharding.params=1) are not gathered",
         lambda c: c.sharding.params != 1),
    Need("collectives", "grads_format", "sharding=zero1", "gradients are summed instead, in "
         "collectives.sums_format", lambda c: c.sharding.optimizer != 1),
    Need("collectives", "grads_across_format", "sharding=zero1",
         "no gradients are scattered between nodes", _crosses_nodes),
    Need("collectives", "refresh_format refresh_differences refresh_full_every", "sharding=zero1",
         "each rank updates the parameters that it stores (sharding.params=sharding.optimizer)",
         _refreshes),
    Need("collectives", "refresh_full_every", "collectives.refresh_differences=true",
         "without differences, all refreshes send parameters",
         lambda c: c.collectives.refresh_differences),
    Need("collectives", "block_elements scales_format rounding until_step",
         "collectives=zeropp sharding=zero3",
         "no collective sends integers", _is_quantised),
    Need("collectives", "rotation_elements", "collectives=four_bits sharding=zero1",
         "only gradients in int4 are rotated",
         lambda c: "int4" in _formats_of_gradients(c)),
    Need("collectives", "error_feedback feedback_format feedback_decay feedback_reset_every",
         "collectives=zeropp sharding=zero3", "no gradients are rounded between nodes",
         _rounds_between_nodes),
    Need("collectives", "feedback_format feedback_decay feedback_reset_every",
         "collectives.error_feedback=true", "no rounding errors are kept",
         lambda c: c.collectives.error_feedback),
    Need("collectives", "communicators", "cluster=NAME of a machine with GPUs",
         "CPUs have no NCCL or RCCL", _is_on_gpu),
    Need("collectives", "pairwise", "cluster=cpu_laptop", "GPUs send with NCCL or RCCL",
         lambda c: not _is_on_gpu(c)),
    Need("precision", "initial_loss_scale minimum_loss_scale growth_steps", "precision=fp16",
         "other formats have no loss scale", lambda c: c.precision.name == "fp16"),
    Need("optimizer", "minimum_learning_rate", "optimizer.schedule=cosine",
         "a constant learning rate does not fall", lambda c: c.optimizer.schedule != "constant"),
    Need("optimizer", "decay_steps", "optimizer.schedule=cosine",
         f"only the schedules {', '.join(ENDING)} end", lambda c: c.optimizer.schedule in ENDING),
    Need("optimizer", "cooldown_steps cooldown_share cooldown_shape", "optimizer.schedule=wsd",
         "other schedules have no cooldown", lambda c: c.optimizer.schedule == "wsd"),
    Need("optimizer", "timescale_steps", "optimizer.schedule=inverse_sqrt",
         "other schedules have no timescale", lambda c: c.optimizer.schedule == "inverse_sqrt"),
    Need("optimizer", "momentum", "optimizer=muon", "only Muon uses it",
         lambda c: c.optimizer.name == "muon"),
    Need("optimizer", "epsilon", "optimizer=adamw", "Adafactor does not use it",
         lambda c: c.optimizer.name != "adafactor"),
    Need("optimizer", "decayed", "optimizer.weight_decay=0.1", "nothing decays",
         lambda c: c.optimizer.weight_decay > 0),
    Need("optimizer.rate_factors", "head", "model.tied=false", "the head has no matrix of its own; "
         "optimizer.rate_factors.embedding is the factor of the shared one",
         lambda c: not c.model.tied),
    Need("trainer", "spike_window rewinds_allowed", "trainer.spike_factor=3",
         "no loss is a spike", lambda c: c.trainer.spike_factor is not None),
    Need("trainer", "sample_prompts", "trainer.sample_tokens=48", "no text is generated",
         lambda c: c.trainer.sample_tokens > 0),
    Need("run", "init_encoder_from", "model=t5gemma_9b_2b run.init_from=DECODER",
         "only the sides of an encoder-decoder begin with two decoders",
         lambda c: c.model.kind == "t5" and c.run.init_from is not None),
    Need("launch", "trial_minutes", "launch.trial_runner=train", "predicted trials do not run",
         lambda c: c.launch.trial_runner == "train"),
    Need("launch", "trial_minutes trial_value trial_runner trial_micro_batches", SWEEP,
         "a run that is no trial ignores it", lambda c: False),
    Need("recovery", "spares tries timeout_seconds", "recovery.enabled=true",
         "dead ranks are not replaced", lambda c: c.recovery.enabled),
    Need("recovery", "copies_path", "recovery.partner_copies=true", "no copies are kept in memory",
         lambda c: c.recovery.partner_copies),
    Need("watchdog", "step_seconds step_factor", "watchdog.enabled=true", "no limit is enforced",
         _is_watched),
    Need("watchdog", "first_step_seconds checkpoint_seconds evaluation_seconds",
         "watchdog.enabled=true", "no limit is enforced",
         lambda c: _is_watched(c) or c.recovery.enabled),
    Need("watchdog", "straggler_ratio", "watchdog.stragglers_every_steps=200",
         "ranks are not compared", lambda c: c.watchdog.stragglers_every_steps is not None),
    Need("watchdog", "replace_stragglers", "recovery.enabled=true", "no rank is replaced",
         lambda c: c.recovery.enabled and c.watchdog.stragglers_every_steps is not None),
    Need("checkpoint", "every_steps keep keep_every_steps files timeout_seconds pool_bytes on_error"
         " when_busy partner protection_minutes moments drain_mb_per_second end_seconds"
         " tiers.local.path"
         " tiers.local.keep tiers.local.every_steps tiers.archive.command tiers.archive.every_steps"
         " tiers.archive.tries tiers.archive.pause_seconds", "checkpoint=lazy",
         "no checkpoint is written", lambda c: c.checkpoint.mode != "off"),
    Need("checkpoint", "when_busy", "checkpoint=lazy", "training waits for each checkpoint",
         lambda c: c.checkpoint.mode == "lazy"),
    Need("checkpoint", "partner moments drain_mb_per_second tiers.local.keep"
         " tiers.local.every_steps", "checkpoint.tiers.local.path=DIRECTORY",
         "there are no node-local checkpoints", _saves_locally),
    Need("checkpoint", "protection_minutes",
         "checkpoint.partner=true checkpoint.tiers.local.path=DIRECTORY",
         "no checkpoint is copied to the next node",
         lambda c: c.checkpoint.has_partner or c.recovery.partner_copies),
    Need("checkpoint.tiers.local", "keep every_steps", "recovery.partner_copies=false",
         "copies in memory are made after every step",
         lambda c: not c.recovery.partner_copies),
    Need("checkpoint", "end_seconds", "checkpoint=lazy checkpoint.tiers.local.path=DIRECTORY",
         "the run directory has every checkpoint at once",
         lambda c: _saves_locally(c) and c.checkpoint.mode == "lazy"),
    Need("checkpoint.tiers.archive", "every_steps tries pause_seconds",
         "checkpoint.tiers.archive.command=COMMAND", "there is no archive",
         lambda c: c.checkpoint.tiers.archive.command is not None),
    Need("planner", "goal_tokens_per_second", "planner.objective=nodes",
         "other objectives have no goal", lambda c: c.planner.objective == "nodes"),
    Need("telemetry", "wandb_project", "telemetry.wandb=offline", "Weights & Biases is not used",
         lambda c: c.telemetry.wandb != "off"),
    Need("telemetry", "trace_from_step", "trainer.steps={telemetry.trace_from_step}",
         "the run ends before this step",
         lambda c: (c.telemetry.trace_from_step or 1) <= c.trainer.steps),
    Need("telemetry", "trace_steps", "telemetry.trace_from_step=10", "no step is traced",
         lambda c: c.telemetry.trace_from_step is not None),
)
# fmt: on
