"""The configuration of a run: TOML in, frozen and validated sections out.

Every mistake a user can make ends as one ``ConfigError`` line that names the key, the value and the remedy.
"""

from tlt_hpc.common.errors import UserError
from tlt_hpc.config.checks import (
    check_model_limits,
    check_ranks,
    check_replicas,
    check_run_can_learn,
    check_sequence_parallel,
    config_for_comparison,
    truncation_warning,
)
from tlt_hpc.config.data_sections import (
    CONTINUES,
    EMBEDDED_MODEL,
    EMBEDDED_TASK,
    DataSection,
    ModelSection,
    RewardSection,
    RunSection,
)
from tlt_hpc.config.fields import ConfigError, Section
from tlt_hpc.config.reading import (
    FREE_ON_RESUME,
    apply_override,
    check_resumable,
    load_config,
    load_config_or_problems,
    load_saved_config,
    parse_config,
    to_toml,
)
from tlt_hpc.config.rollout_sections import DrafterSection, RolloutSection, SpeculationSection, WarmupSection
from tlt_hpc.config.sections import Config, EvaluationSection
from tlt_hpc.config.update_sections import AlgorithmSection, LoraSection, OptimizerSection
