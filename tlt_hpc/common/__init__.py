"""What every package uses: records, errors, reading of files, and text for terminals."""
