"""``tlt data prepare``: data sets of the hub as the files that a job reads."""
