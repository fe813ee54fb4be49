"""``tlt rehearse``: interrupts a short run of a user's job in every way that ends runs, and resumes it each time."""
