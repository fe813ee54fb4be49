"""A reward from 0 to 1: how near the last number of a response is to the answer."""

import re


def close(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    numbers = re.findall(r"-?\d+", solution_str)
    return 1 / (1 + abs(int(numbers[-1][:9]) - int(ground_truth))) if numbers else 0.0
