"""All commands of ``tlt``, in the order of its help: options, and the function or module that does the work."""

from __future__ import annotations

from tlt_hpc.cli import command_line
from tlt_hpc.cli.command_line import Command
from tlt_hpc.cli.rank_commands import ablate, compare, describe_written_files, evaluate, run_progress, train, warmup
from tlt_hpc.export import export_options
from tlt_hpc.look.arguments import add_runs_arguments, add_watch_arguments
from tlt_hpc.plan import plan_options

_TRAIN = "train a policy; in a folder that has a checkpoint, resume it"
_COMPARE = "run the same steps in four modes of speculation, none included; status 1: text, rewards or weights differ"
_WARMUP = "train the drafter before any reinforcement learning, or resume that"
_ABLATE = "compare the drafter left out, frozen and trained in several ways"
_EVALUATE = "judge a checkpoint or a model on data sets, or resume that"
_PLAN = "predict the memory that a run takes, by phase; status 1: more than there is"
_SIMULATE = "predict seconds and GPU-hours of a run by number of nodes"
_PREFLIGHT = "find before a job what would end it; status 1: something would"
_REHEARSE = "interrupt a short run of a job by four kinds of faults, and resume it; status 1: something is lost"
_INIT = "copy the shipped job files and batch scripts into a folder"
_SUBMIT = "check a run or a sweep, and submit it to Slurm"
_LIST = "list what was submitted"
_STATUS = "show how the runs of a submission stand; status 1: one has failed"
_RESUBMIT = "submit again what failed, timed out or stopped early; it resumes"
_COLLECT = "show what the runs of a submission have reached"
_CANCEL = "end what waits or runs of a submission"
_RUNS = "list runs with step, score, state and cost"
_WATCH = "follow a run by its files alone; status 1: it hangs or is dead"
_REPORT = "one page of HTML: what a run learned, where its time went, what it gained"
_KEYS = "print every key of the configuration: values, default, unit, meaning"
_DRAFTER = "write a run's drafter as other engines load it"
_POLICY = "write a run's policy as a Hugging Face folder"
_DATA = "inspect: count and check what a run would train on"
_PREPARE = "turn a data set of the hub, downloaded before, into what a job reads"
_REWARD = "judge the responses of a file by a job's rules: what was read, why; status 1: another verdict was expected"
_SUBMISSIONS = "tlt_hpc.cli.submissions"
_EXTRAS = "tlt_hpc.extras"


def make_extra_command(group: str, words: str, module: str) -> Command:
    """A command of one process whose options and work are in a module of an extra."""
    return Command(group, words, f"{_EXTRAS}.{module}", f"{_EXTRAS}.{module}")


COMMANDS = {
    "train": Command("run", _TRAIN, lambda command: None, train, run_progress),
    "evaluate": Command("run", _EVALUATE, command_line.add_evaluate_options, evaluate, describe_written_files),
    "warmup": Command("run", _WARMUP, command_line.add_warmup_options, warmup, describe_written_files),
    "compare": Command("run", _COMPARE, command_line.add_compare_options, compare),
    "ablate": Command("run", _ABLATE, f"{_EXTRAS}.ablate.ablation_plan", ablate),
    "data": Command("prepare and check", _DATA, command_line.add_data_options, "tlt_hpc.cli.inspect_data"),
    "data prepare": make_extra_command("prepare and check", _PREPARE, "prepare_data.prepare_data"),
    "reward": make_extra_command("prepare and check", _REWARD, "judge_responses.judge_responses"),
    "keys": Command("prepare and check", _KEYS, command_line.add_keys_options, "tlt_hpc.cli.show_keys"),
    "plan": Command("prepare and check", _PLAN, plan_options.add_plan_options, "tlt_hpc.plan.memory.summary"),
    "simulate": make_extra_command("prepare and check", _SIMULATE, "simulate.predict"),
    "preflight": make_extra_command("prepare and check", _PREFLIGHT, "preflight.checklist"),
    "rehearse": make_extra_command("prepare and check", _REHEARSE, "rehearse.rehearse"),
    "submit": Command("on a cluster", _SUBMIT, command_line.add_submit_options, _SUBMISSIONS),
    "submit list": Command("on a cluster", _LIST, command_line.add_list_options, _SUBMISSIONS),
    "submit status": Command("on a cluster", _STATUS, command_line.add_submission_argument, _SUBMISSIONS),
    "submit resubmit": Command("on a cluster", _RESUBMIT, command_line.add_resubmit_options, _SUBMISSIONS),
    "submit collect": Command("on a cluster", _COLLECT, command_line.add_collect_options, _SUBMISSIONS),
    "submit cancel": Command("on a cluster", _CANCEL, command_line.add_cancel_options, _SUBMISSIONS),
    "runs": Command("look at runs", _RUNS, add_runs_arguments, "tlt_hpc.look.live.list_runs"),
    "watch": Command("look at runs", _WATCH, add_watch_arguments, "tlt_hpc.look.live.watch_run"),
    "report": make_extra_command("look at runs", _REPORT, "report.write_report"),
    "export-policy": Command("use the results", _POLICY, export_options.add_policy_options, "tlt_hpc.export.policy"),
    "export-drafter": Command(
        "use the results", _DRAFTER, f"{_EXTRAS}.drafter_formats.options", f"{_EXTRAS}.drafter_formats.export_drafter"
    ),
    "init": Command("set up", _INIT, command_line.add_init_options, "tlt_hpc.cli.init_folder"),
}
