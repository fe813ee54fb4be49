"""The configuration of a run: TOML in, frozen and validated sections out. Knows recipes alone.

Every mistake a user can make ends as one ``ConfigError`` line that names the key, the value and the remedy.
"""

from tlt_hpc.config.algorithm import AlgorithmSection, OptimizerSection
from tlt_hpc.config.base import ConfigError, Section, UserError
from tlt_hpc.config.data import EMBEDDED_TASK, TASK_PREFIX, DataSection, RewardKind, RewardSection
from tlt_hpc.config.drafter import DrafterSection, LossKind, SpeculationSection, WarmupSection
from tlt_hpc.config.evaluation import EvaluationSection
from tlt_hpc.config.reading import apply_override, find_problems, load_config, load_saved_config, parse_config, to_toml
from tlt_hpc.config.resume import FREE_ON_RESUME, check_resumable
from tlt_hpc.config.tracking import TrackingSection
from tlt_hpc.config.whole import (
    EMBEDDED_MODEL,
    CheckpointSection,
    Config,
    ModelSection,
    RolloutSection,
    RunSection,
    check_learns,
    check_model_limits,
    check_ranks,
    check_replicas,
    check_sequence_parallel,
    refuse_replicas,
    without_side_effects,
)
