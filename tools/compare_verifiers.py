"""Compares the reward kind ``math`` with other verifiers on pairs whose verdict is known by construction.

    python tools/compare_verifiers.py [--pairs 2400] [--seed 1] [--verl FOLDER]

The pairs are those of tests/math_pairs.py. math-verify is run as it is; with ``--verl`` also the rules of verl's
``math_reward`` (those of the data set MATH) and ``math_dapo``, from the folder verl/utils/reward_score of its package
(``pip download --no-deps verl`` and unzip). The table has, for each kind of pair, how many verdicts are wrong: right
answers refused + wrong answers accepted.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from tlt_hpc.rewards.mathematics import equal_as_mathematics

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from math_pairs import Pair, pairs  # type: ignore[import-not-found]

Verifier = Callable[[str, str], bool]


def by_math_verify(response: str, truth: str) -> bool:
    """math-verify's verdict, the data's answer in a box as its documentation has it."""
    marked = truth if "\\boxed" in truth or "$" in truth else f"\\boxed{{{truth}}}"
    return bool(verify(parse(marked), parse(response)))


def verl_verifiers(folder: Path) -> dict[str, Verifier]:
    """verl's verifiers, which need no other part of it."""
    by_math, by_dapo = (_module(folder / f"{name}.py") for name in ("math_reward", "math_dapo"))
    return {
        "verl math_reward": lambda response, truth: bool(by_math.compute_score(response, truth)),
        "verl math_dapo": lambda response, truth: bool(by_dapo.verify(response, truth, strict_box_verify=True)[0]),
    }


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verl", type=Path, help="the folder verl/utils/reward_score")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # verifiers report each expression that they cannot read
    verifiers: dict[str, Verifier] = {
        "tlt_hpc": lambda response, truth: equal_as_mathematics(response, truth).reward == 1.0,
        "math-verify": by_math_verify,
        **(verl_verifiers(options.verl) if options.verl else {}),
    }
    wrong: dict[str, dict[str, list[Pair]]] = {name: defaultdict(list) for name in verifiers}
    counts: dict[str, int] = defaultdict(int)
    for pair in pairs(options.seed, options.pairs):
        counts[pair.kind] += 1
        for name, judge in verifiers.items():
            if judge(pair.response, pair.truth) != pair.is_right:
                wrong[name][pair.kind].append(pair)
    print(f"| kind | pairs | {' | '.join(verifiers)} |\n|---{'|---' * (len(verifiers) + 1)}|")
    for kind, count in counts.items():
        print(f"| {kind} | {count} | {' | '.join(_refused_and_accepted(wrong[name][kind]) for name in verifiers)} |")
    totals = ([pair for found in wrong[name].values() for pair in found] for name in verifiers)
    print(f"| all | {sum(counts.values())} | {' | '.join(map(_refused_and_accepted, totals))} |")


def _refused_and_accepted(found: list[Pair]) -> str:
    refused = sum(pair.is_right for pair in found)
    return f"{refused} + {len(found) - refused}" if found else "0"


if __name__ == "__main__":
    main()
