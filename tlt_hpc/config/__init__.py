"""The configuration of a run: TOML in, frozen and validated sections out.

Every mistake a user can make ends as one ``ConfigError`` line that names the key, the value and the remedy.
"""

from tlt_hpc.config.checks import (
    check_learns,
    check_model_limits,
    check_ranks,
    check_replicas,
    check_sequence_parallel,
    without_side_effects,
)
from tlt_hpc.config.reading import apply_override, find_problems, load_config, load_saved_config, parse_config, to_toml
from tlt_hpc.config.resume import FREE_ON_RESUME, check_resumable
from tlt_hpc.config.sections import (
    EMBEDDED_MODEL,
    EMBEDDED_TASK,
    TASK_PREFIX,
    AlgorithmSection,
    Config,
    ConfigError,
    DataSection,
    DrafterSection,
    LossKind,
    OptimizerSection,
    RewardSection,
    Section,
    SpeculationSection,
    TrackingSection,
    UserError,
    WarmupSection,
)
