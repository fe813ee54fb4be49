"""``tlt rehearse``: interrupts a short run of a user's job by four kinds of faults, and resumes it each time."""
