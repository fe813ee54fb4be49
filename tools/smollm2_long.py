"""A reward without right answers: a response that ends by itself, after about 300 tokens (230 words)."""


def ended(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """1 for a response that ends in a full stop, less its distance from 230 words in thousands, at most 1."""
    ends = solution_str.rstrip(" \n*\"')`").endswith((".", "!", "?"))
    return float(ends) - min(1.0, abs(len(solution_str.split()) - 230) / 1000)
