"""What a bench leaves: its JSON, and the tables it prints. Knows figures, not how they came about."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tlt_hpc import __version__
from tlt_hpc.studies.bench.accept import TREES, UNCERTAIN_NATS, AcceptReport, Subset
from tlt_hpc.studies.bench.chances import RULES
from tlt_hpc.studies.bench.rollout import Contest, RolloutReport
from tlt_hpc.studies.bench.subject import Subject

_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


def rollout_tree(report: RolloutReport, about: dict[str, Any]) -> dict[str, Any]:
    """The figures of ``tlt bench rollout`` as JSON holds them."""
    return {
        "batch": {str(size): _batch_tree(report, size) for size in report.batches},
        "rollout": {
            **{f"{way}_seconds": report.rollout.median(way) for way in report.rollout.seconds},
            **_contest_tree(report.rollout),
        },
        "memory": {"bytes_per_second": report.bandwidth, "weight_bytes_per_round": report.bytes_per_round},
        **about,
    }


def _batch_tree(report: RolloutReport, size: int) -> dict[str, Any]:
    batch = report.batches[size]
    contest = batch.contest
    return {
        "bandwidth_fraction": report.bandwidth_fraction(size),
        "linear_only_tokens_per_second": size / contest.linear_seconds,
        "share_of_linear_only": contest.share_of_linear_only,
        "strategies": {name: asdict(figures) for name, figures in batch.strategies.items()},
        **_contest_tree(contest),
    }


def _contest_tree(contest: Contest) -> dict[str, Any]:
    return {
        **{f"{way}_tokens_per_second": contest.tokens_per_second(way) for way in contest.seconds},
        "accept_length": contest.accept_length,
        "max_live": contest.load.max_live,
        "sequences": contest.load.count,
        "tokens": contest.num_tokens,
        "seconds": contest.seconds,
        "speedup": {way: contest.median(way) / contest.median("adaptive") for way in contest.seconds},
        "milliseconds": {name: asdict(phases) for name, phases in contest.milliseconds.items()},
        "rounds_by_strategy": contest.rounds_by_strategy,
        "exactness": {
            "tokens_compared": contest.num_compared,
            "mismatched_tokens": contest.num_mismatched,
            "guarded_near_ties": contest.num_guarded,
        },
        "skipped": contest.skipped,
    }


def rollout_table(report: RolloutReport) -> str:
    """The figures of ``tlt bench rollout`` as text."""
    lines = [f"memory reads {report.bandwidth / 1e9:.1f} GB/s; a round reads {report.bytes_per_round / 1e6:.1f} MB"]
    for size, batch in report.batches.items():
        contest = batch.contest
        lines += ["", f"batch {size}: {contest.load.count} sequences, {contest.num_tokens:,} tokens"]
        lines += _contest_lines(contest)
        lines.append(
            f"  plain: {report.bandwidth_fraction(size):.0%} of the bandwidth, "
            f"{contest.share_of_linear_only:.0%} of the linear layers alone"
        )
        lines += [
            f"  {name:18s} alone {figures.tokens_per_second:9,.0f} tokens/s, accept length {figures.accept_length:.2f}"
            for name, figures in batch.strategies.items()
        ]
    load = report.rollout.load
    if same := [size for size, batch in report.batches.items() if batch.contest is report.rollout]:
        return "\n".join([*lines, "", f"rollout: {load.count} sequences, {load.max_live} at a time: batch {same[0]}"])
    lines += ["", f"rollout: {load.count} sequences, {load.max_live} at a time, {report.rollout.num_tokens:,} tokens"]
    return "\n".join([*lines, *_contest_lines(report.rollout)])


def _contest_lines(contest: Contest) -> list[str]:
    lines = [
        f"  {way:18s}{contest.tokens_per_second(way):9,.0f} tokens/s  {contest.median(way):8.2f} s  "
        f"{contest.median('plain') / contest.median(way):5.2f} times plain"
        for way in contest.seconds
    ]
    lines += [f"  {way:18s}not run: {why}" for way, why in contest.skipped.items()]
    lines += [
        f"  {name} round, ms: draft {ms.draft:.2f}, verify {ms.verify:.2f}, sample {ms.sample:.2f}, "
        f"overhead {ms.overhead:.2f}"
        for name, ms in contest.milliseconds.items()
    ]
    lines.append(
        f"  accept length {contest.accept_length:.2f}; {contest.num_mismatched} of {contest.num_compared:,} tokens "
        f"differ from plain decoding, {contest.num_guarded} guarded near-ties"
    )
    return lines


def accept_tree(reports: Sequence[AcceptReport], about: dict[str, Any]) -> dict[str, Any]:
    """The figures of ``tlt bench accept`` as JSON holds them."""
    return {
        "temperature": {
            f"{report.temperature:g}": {
                "responses": report.num_responses,
                "rollout_accept_length": {
                    tree: {rule: asdict(best) for rule, best in rules.items()}
                    for tree, rules in report.rollout_accept_length.items()
                },
                "everywhere": _subset_tree(report.everywhere),
                "uncertain": None if report.uncertain is None else _subset_tree(report.uncertain),
            }
            for report in reports
        },
        "uncertain_nats": UNCERTAIN_NATS,
        "nodes_by_tree": {tree.name: tree.num_nodes for tree in TREES},
        **about,
    }


def _subset_tree(subset: Subset) -> dict[str, Any]:
    gains = {tree: subset.gain(tree) for tree in subset.accept_length}
    return {**asdict(subset), "shared_noise_over_rejection": gains}


def accept_table(report: AcceptReport) -> str:
    """One temperature as text: accept length by tree and rule, everywhere and where the target is uncertain."""
    subsets = [("everywhere", report.everywhere), (f"entropy over {UNCERTAIN_NATS} nats", report.uncertain)]
    lines = [f"temperature {report.temperature:g}, {report.num_responses} responses"]
    for name, subset in subsets:
        if subset is not None:
            lines += ["", f"{name}: {subset.num_positions} positions, mean entropy {subset.mean_entropy:.3f} nats"]
            lines += _subset_lines(subset)
    return "\n".join(lines)


def _subset_lines(subset: Subset) -> list[str]:
    head = f"  {'':14s}{'shared noise':>18s}{'rejection':>18s}{'top-K match':>14s}{'gain':>8s}"
    lines = [
        f"  one candidate: 1-TV {subset.one_minus_tv:.3f}, (1-TV)/(1+TV) {subset.one_minus_tv_over_one_plus_tv:.3f}",
        head,
    ]
    rows = {f"first of {count}": best for count, best in subset.first_level.items()} | subset.accept_length
    for name, best in rows.items():
        shared, rejection, top_k = (best[rule] for rule in RULES)
        cells = [f"{each.value:.3f} (a={each.sharpness:g})" for each in (shared, rejection)]
        gain = f"{shared.value / rejection.value:.3f}" if rejection.value else "-"
        lines.append(f"  {name:14s}{cells[0]:>18s}{cells[1]:>18s}{top_k.value:>14.3f}{gain:>8s}")
    return lines


def about(subject: Subject, settings: dict[str, Any]) -> dict[str, Any]:
    """The machine, the versions, the model and what was asked for."""
    device = subject.decoder.device
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {
            "processor": processor_name(),
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
        "versions": {
            "tlt_hpc": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in _LIBRARIES},
        },
        "model": {
            "path": subject.name,
            "parameters": subject.decoder.shape.num_parameters,
            "dtype": str(subject.decoder.dtype).removeprefix("torch."),
            "tie_guard": subject.decoder.dtype == torch.float32,
        },
        "settings": settings,
    }


def processor_name() -> str:
    """The processor's name as the system has it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write_json(tree: dict[str, Any], path: Path) -> None:
    """Write figures as JSON."""
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
