"""The workbook's steps as functions: each reads the run folder, does one thing, and leaves an outcome behind."""
