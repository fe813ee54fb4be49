"""A reward from 0 to 1: how near the last number of a response is to the answer."""

import re


def close(data_source, solution_str, ground_truth, extra_info=None):
    numbers = re.findall(r"-?\d+", solution_str)
    return 1 / (1 + abs(int(numbers[-1][:9]) - int(ground_truth))) if numbers else 0.0
