"""One page that says what a run did, what it learned, where its time went and what speculation gained."""
