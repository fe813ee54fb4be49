"""What a response is worth: judged by its text alone, in this process or in one that can be killed."""
