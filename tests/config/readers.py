"""The modules that read keys whose effect no prediction shows: an explicit list."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "frontier_llm", ROOT / "frontier_lab")


def source_of(module: str) -> Path:
    """Return the file of a module such as model/gpt.py, which one of the packages has."""
    (found,) = (folder / module for folder in PACKAGES if (folder / module).exists())
    return found


READERS = {
    "model/transformer.py": "model.heads model.kv_heads model.norm_epsilon",
    "model/chunk.py": "model.logit_softcap model.scaled_embedding model.encoder_embedding",
    "model/rotary.py": "model.rotary_base model.rotary_local_base model.rotary_scaling"
    " model.rotary_factor"
    " model.rotary_original_length model.rotary_slow_turns model.rotary_fast_turns"
    " model.rotary_attention_factor",
    "model/layer_stack.py": "model.relative_distance",
    "model/layer.py": "model.norm_placement model.residual model.attention_softcap"
    " model.attention_dropout model.qkv_bias",
    "model/build.py": "model.init_std model.zero_centred_norms",
    "config/model.py": "model.scaled_attention model.score_width model.encoder_window"
    " model.encoder_window_after model.cross_attention",
    "geometry/model_chunks.py": "model.encoder_layers",
    "geometry/resolved.py": "parallel.schedule parallel.layers_per_stage collectives.pairwise"
    " launch.ranks_per_node",
    "geometry/partition.py": "sharding.params sharding.grads sharding.optimizer",
    "trainer/states.py": "sharding.units_in_flight sharding.fused_gradients",
    "geometry/formats.py": "collectives.rotation_elements collectives.rounding"
    " collectives.feedback_decay collectives.feedback_reset_every collectives.until_step",
    "trainer/connect.py": "collectives.backend launch.timeout_seconds launch.preflight_seconds",
    "trainer/progress.py": "precision.initial_loss_scale precision.minimum_loss_scale"
    " precision.growth_steps",
    "sharding/update_groups.py": "optimizer.beta1 optimizer.beta2 optimizer.epsilon"
    " optimizer.weight_decay optimizer.decayed optimizer.rate_factors.embedding"
    " optimizer.rate_factors.matrices optimizer.rate_factors.norms",
    "sharding/muon.py": "optimizer.momentum",
    "trainer/step.py": "optimizer.z_loss optimizer.clip_norm data.loss_mean"
    " optimizer.cross_attention_steps",
    "data/source.py": "data.kind data.path data.text_key",
    "data/source_choice.py": "data.format",
    "data/corpora.py": "data.corpora data.blend_alpha",
    "data/prepare.py": "data.tokenizer data.vocabulary data.validation_percent data.unique"
    " data.directory data.end_of_document",
    "data/corpus_build.py": "data.broken",
    "data/sample_counts.py": "data.decoder_length",
    "data/run_loader.py": "model.start_token data.documents data.denoisers data.packing"
    " data.workers data.prefetch trainer.seed trainer.evaluate_batches",
    "device/kernels.py": "trainer.deterministic",
    "trainer/loop.py": "trainer.evaluate_every_steps",
    "trainer/callbacks/run_checks.py": "trainer.bad_steps_allowed trainer.spike_factor"
    " trainer.spike_window trainer.rewinds_allowed watchdog.stragglers_every_steps"
    " watchdog.straggler_ratio watchdog.replace_stragglers",
    "trainer/callbacks/run_report.py": "trainer.sample_tokens run.dir"
    # names in the output
    " model.name sharding.name collectives.name data.name cluster.name cluster.device.name",
    "trainer/sample.py": "trainer.sample_prompts",
    "cli/train.py": "launch.ranks launch.port launch.threads recovery.enabled plan",
    "jobs/launch.py": "launch.nodes",
    "health/preflight.py": "launch.meeting_seconds",
    "launch/stop.py": "launch.stop_minutes",
    "sweeps/funnel.py": "launch.trial_minutes",
    "sweeps/sweep.py": "launch.trial_value launch.trial_runner",
    "sweeps/trial_runner.py": "launch.trial_micro_batches",
    "cli/compose.py": "launch.elastic",
    "cli/replaceable.py": "recovery.spares recovery.tries recovery.timeout_seconds",
    "config/partner_copies.py": "recovery.copies_path recovery.partner_copies",
    "health/watchdog.py": "watchdog.enabled watchdog.startup_seconds"
    " watchdog.first_step_seconds watchdog.step_seconds watchdog.step_factor"
    " watchdog.checkpoint_seconds watchdog.evaluation_seconds",
    "saving/checkpoints.py": "checkpoint.when_busy checkpoint.on_error checkpoint.end_seconds",
    "saving/tiers.py": "checkpoint.every_steps checkpoint.tiers.local.every_steps checkpoint.keep"
    " checkpoint.keep_every_steps checkpoint.tiers.local.keep",
    "saving/tier_writers.py": "checkpoint.files checkpoint.protection_minutes"
    " checkpoint.timeout_seconds checkpoint.drain_mb_per_second",
    "geometry/host_pool.py": "checkpoint.pool_bytes",
    "saving/restorer.py": "checkpoint.verify checkpoint.fallback",
    "trainer/resume.py": "run.init_from run.resume",
    "checkpoint/archive.py": "checkpoint.tiers.archive.command checkpoint.tiers.archive.tries"
    " checkpoint.tiers.archive.every_steps checkpoint.tiers.archive.pause_seconds",
    "cli/machine_defaults.py": "cluster.ranks_per_node",
    "trainer/step_meter.py": "cluster.device.name_pattern",
    "planner/compute.py": "cluster.device.calibration.products cluster.device.calibration.kernels"
    " planner.engine.follows_kernels planner.engine.recompute_stops_early"
    " cluster.device.calibration.host planner.engine.host.layer_us"
    " planner.engine.host.backward_share planner.engine.host.tensor_us"
    " planner.engine.host.tensor_rank_us planner.engine.host.tensor_wait_us"
    " planner.engine.host.micro_batch_us planner.engine.host.step_us",
    "planner/communication.py": "cluster.links",
    "planner/step_time.py": "cluster.storage",
    "planner/estimate.py": "cluster.device.peak_tflops",
    "planning/run_cost.py": "cluster.operation",
    "calibration/network.py": "cluster.environment_alternatives",
    "planner/candidate.py": "planner.nodes",
    "planner/space.py": "planner.params planner.grads planner.optimizer planner.survives"
    " planner.engine.shards",
    "planning/cuts.py": "planner.tensor planner.pipeline planner.chunks planner.schedule"
    " planner.context planner.micro_batch planner.recompute",
    "planning/search.py": "planner.objective planner.rows planner.goal_tokens_per_second",
    "health/rank_checks.py": "cluster.environment",
    "saving/changes.py": "run.allow_changes",
    "config/cluster.py": "cluster.host.cores",
    "commands/plan.py": "cluster.host.memory_gib planner.collectives planner.tokens"
    " planner.engine.name",
    "planner/state_costs.py": "planner.engine.second_copy_ranks planner.engine.exchanges_gradients"
    " planner.engine.broadcasts_refresh planner.engine.refresh_owner_us"
    " planner.engine.reduces_once",
    "planner/layout_time.py": "planner.engine.splits_backward planner.engine.product_ratio",
    "trainer/callbacks/records.py": "telemetry.progress telemetry.console_every_steps"
    " telemetry.wandb telemetry.wandb_project telemetry.tensorboard",
    "trainer/callbacks/measurements.py": "telemetry.trace_from_step telemetry.trace_steps",
    "cli/run_preparation.py": "callbacks",
}
