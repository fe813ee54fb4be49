"""Sections of a run: its name and length, the model, the prompts and the rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from tlt_hpc.config.fields import (
    MAX_ITEMS,
    MAX_PATH_BYTES,
    MAX_SECONDS,
    MAX_WEIGHT,
    ColumnName,
    FilePath,
    NumRanks,
    NumSteps,
    NumTokens,
    PositiveSeconds,
    Section,
    Seed,
    SomePath,
    Text,
    Unit,
    check_package,
    check_path,
    zero_or_range_validator,
)

TrackerName = Literal["tensorboard", "wandb", "wandb-offline"]
EMBEDDED_MODEL = "embedded:tiny"
EMBEDDED_TASK = "embedded:gcd"


def _unexpanded_path_problems(key: str, path: str) -> Iterator[str]:
    """Yield a problem if a path has ``~`` or a variable, which a shell does not expand behind ``run.folder=``."""
    if re.match(r"~|.*\$[A-Za-z_{]", path):
        yield f"{key} = {path!r}: ~ and variables are not expanded in it; give the path itself"


def _as_list(value: object) -> object:
    """A list of names, also where one is given alone."""
    return (value,) if isinstance(value, str) else value


class RunSection(Section):
    """Name, place and length of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=128)]
    """Name of the run and of its folder."""
    folder: FilePath = "runs"
    """Parent folder; the run writes to ``folder/name``."""
    seed: Seed = 0
    """Seed of the order of the prompts, of sampling and of new weights."""
    num_steps: NumSteps
    """Length of the run: one step is a rollout and the update from it."""
    ranks: NumRanks = 1
    """MPI ranks that ``tlt`` starts if srun or mpiexec did not start it."""
    stall_factor: Annotated[float, Field(ge=0.0, le=1e5), zero_or_range_validator(0.01, 1e5)] = 1.0
    """Factor on the times after which a rank without progress ends the job (docs/cluster.md). 0: never."""
    trackers: Annotated[
        tuple[TrackerName, ...], BeforeValidator(_as_list), Field(strict=False, max_length=MAX_ITEMS)
    ] = ()
    """Trackers that receive what ``metrics.jsonl`` holds (docs/monitoring.md), each in a folder of the run.
    ``wandb-offline`` writes files for ``wandb sync``; ``wandb`` needs a network on the node of rank 0, and a login."""

    @property
    def tracker_packages(self) -> dict[str, TrackerName]:
        """The packages of the trackers, each with the tracker's name."""
        return {name.removesuffix("-offline"): name for name in self.trackers}

    def check_trackers(self) -> None:
        """Refuse to begin without the package of a tracker; nothing is imported.

        Raises:
            ConfigError: with the command that installs it.
        """
        for package, name in self.tracker_packages.items():
            check_package(f"run.trackers with {name!r}", package)

    def problems(self) -> Iterator[str]:
        """Yield each problem with the values of this section as one line with the remedy."""
        yield from _unexpanded_path_problems("run.folder", self.folder)
        if len(self.tracker_packages) < len(self.trackers):
            yield f"run.trackers = {list(self.trackers)} names a tracker twice; name each once"


class ModelSection(Section):
    """The policy."""

    path: SomePath
    """A Hugging Face folder, or ``embedded:tiny``."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of weights and of forward and backward passes. On a CPU rollouts compute in float32 all the same."""
    batch_invariant: bool = True
    """In ``bfloat16`` on a GPU: kernels whose result for a token does not depend on the rest of the batch, so that
    drafts do not change the text. ``false``: libraries, which are faster."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. ``auto``: on CUDA if there is a GPU."""

    def problems(self) -> Iterator[str]:
        """Yield each problem with the values of this section as one line with the remedy."""
        yield from _unexpanded_path_problems("model.path", self.path)


CONTINUES = "continue_final_message"
"""The argument of transformers that is not passed to the template."""
_OF_EVERY_TEMPLATE = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


class DataSection(Section):
    """The prompts that a run trains on."""

    source: SomePath | Annotated[tuple[SomePath, ...], Field(strict=False, min_length=1, max_length=MAX_ITEMS)]
    """``embedded:gcd``; a .jsonl, .parquet or .arrow file, a list of files, or a pattern (``data/*.parquet``); a folder
    of the Hugging Face hub or of ``datasets`` (the split ``train``). ``~`` and ``$NAME`` are expanded."""
    prompt_key: ColumnName = ""
    """Column of the prompt, a text or a list of messages; dots select a field (``input.text``). Empty: the first that
    exists of ``prompt``, ``problem``, ``question``, ``messages``."""
    answer_key: ColumnName = ""
    """Column of the answer. Empty: the first that exists of ``reward_model.ground_truth``, ``answer``,
    ``ground_truth``."""
    max_prompt_tokens: NumTokens = 1024
    """Longest prompt."""
    overlong: Literal["error", "drop"] = "error"
    """What happens to prompts longer than ``max_prompt_tokens``."""
    chat_template: SomePath = "auto"
    """Jinja file that renders lists of messages. ``auto``: the template of the model folder."""
    template_args: Annotated[dict[str, JsonValue], Field(max_length=MAX_ITEMS)] = Field(default_factory=dict)
    """Arguments of the chat template, such as ``{enable_thinking = false}``. With ``continue_final_message = true`` the
    response continues the assistant's message that a chat ends with."""
    system_prompt: Text = ""
    """System message for prompts that are lists of messages without one."""
    text_prompts: Literal["raw", "chat"] = "raw"
    """How a prompt that is a text is passed to the model: ``raw`` unchanged, ``chat`` rendered as a user's message."""

    @property
    def continues_chats(self) -> bool:
        """True if a response continues an assistant's message that a chat ends with."""
        return bool(self.template_args.get(CONTINUES))

    @property
    def source_name(self) -> str:
        """The source as messages show it."""
        return self.source if isinstance(self.source, str) else ", ".join(self.source)

    def problems(self) -> Iterator[str]:
        """Yield each problem with the values of this section as one line with the remedy."""
        if given := sorted(_OF_EVERY_TEMPLATE & self.template_args.keys()):
            yield f"data.template_args has {given[0]!r}, which every prompt is rendered with; leave it out"
        if not isinstance(wanted := self.template_args.get(CONTINUES, False), bool):
            yield f"data.template_args.{CONTINUES} = {wanted!r}; give true or false"


TagName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=64)]
_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")
FunctionName = Annotated[
    str,
    Field(pattern=f"^{_FUNCTION.pattern}$", max_length=MAX_PATH_BYTES, json_schema_extra={"format": "path.py:name"}),
    AfterValidator(check_path),
]
RewardKind = Literal["boxed", "math", "numeric", "choice", "format", "code"] | FunctionName
RewardWeight = Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]
ANSWER, FORMAT = "answer", "format"
"""Terms of ``reward.weights`` that are no functions: the reward by the kind, and whether the tags are there."""


def is_function(kind: str) -> bool:
    """Return True if a kind of reward or a term of ``reward.weights`` names a function: ``path.py:name``."""
    return ":" in kind


def part_name(term: str) -> str:
    """The name of a term of ``reward.weights`` in figures: ``brevity`` of ``judge.py:brevity``."""
    return term.rpartition(":")[2]


class RewardSection(Section):
    """How responses are scored."""

    default: RewardKind = "boxed"
    """Kind of reward (docs/rewards.md) if ``by_source`` has none: answers are compared as text (``boxed``), by value
    (``math``; ``numeric``, to a millionth) or letter (``choice``); ``format``: tags; ``code``: unit tests;
    ``path.py:name``: a function with verl's signature (data_source, solution_str, ground_truth, extra_info) that
    returns a number, or a dict with one under ``score``."""
    by_source: Annotated[dict[ColumnName, RewardKind], Field(max_length=MAX_ITEMS)] = Field(default_factory=dict)
    """Kind of reward by ``data_source``; names may contain ``*``, ``?`` and ``[]``. An exact name comes first, then the
    first pattern that matches."""
    format_tags: Annotated[tuple[TagName, ...], Field(strict=False, max_length=64)] = ()
    """The response must consist of these tags, each once and in this order, as in ``<a>...</a><b>...</b>``."""
    weights: Annotated[dict[FilePath, RewardWeight], Field(max_length=64)] = Field(default_factory=dict)
    """A reward is the sum of weight x part. Parts: ``answer`` (weight 1 if left out), ``format`` (1 if the tags are
    there) and functions (``"path.py:name"``). A part of weight 0 is only logged."""
    workers: Annotated[int, Field(ge=1, le=1024), Unit("processes")] = 2
    """Processes of a rank that score responses. ``boxed``, ``numeric``, ``choice`` and tags are scored in the rank
    itself."""
    cpu_seconds: PositiveSeconds = 5.0
    """CPU time for one response; beyond it the reward is 0. The limit of wall-clock time is 60 times as long."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds that responses may be scored by, sorted."""
        return tuple(sorted({self.default, *self.by_source.values()}))

    @property
    def terms(self) -> dict[str, float]:
        """The weights of all terms that a reward consists of."""
        return {ANSWER: 1.0, **self.weights}

    @property
    def added_functions(self) -> tuple[str, ...]:
        """The functions in ``weights``, which take part in every reward, each as ``path.py:name``."""
        return tuple(term for term in self.weights if term not in (ANSWER, FORMAT))

    @property
    def functions(self) -> tuple[str, ...]:
        """All functions of the user, each once."""
        return tuple(dict.fromkeys((*filter(is_function, self.kinds), *self.added_functions)))

    @property
    def wall_seconds(self) -> float:
        """Limit for what uses no CPU time, such as a function that waits; far out, so that load decides no verdict."""
        return min(60 * self.cpu_seconds, MAX_SECONDS)

    def problems(self) -> Iterator[str]:
        """Yield each problem with the values of this section as one line with the remedy."""
        if len(set(self.format_tags)) < len(self.format_tags):
            yield f"reward.format_tags = {list(self.format_tags)} names a tag twice; name each tag once"
        if bool(self.format_tags) != ("format" in self.kinds or FORMAT in self.weights):
            yield (
                f"reward.format_tags = {list(self.format_tags)} with reward.weights = {self.weights}: tags and their "
                "use need each other; set format_tags, and 'format' in reward.weights or as a kind"
            )
        yield from self._problems_of_weights()

    def _problems_of_weights(self) -> Iterator[str]:
        if not any(self.terms.values()):
            yield f"reward.weights = {self.weights} makes every reward 0; give a part another weight than 0"
        names = {ANSWER, FORMAT}
        for term in self.added_functions:
            if not _FUNCTION.fullmatch(term):
                yield f"reward.weights names {term!r}; use 'answer', 'format', or a function as 'path.py:name'"
            elif part_name(term) in names:
                yield f"reward.weights names {term!r}, and another part has the same name; rename the function"
            names.add(part_name(term))
