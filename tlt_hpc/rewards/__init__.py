"""Rewards: responses are judged by their text, in this process or in one that can be killed."""
