"""``tlt report``: one page on what a run learned, where its time went and what speculation gained."""
