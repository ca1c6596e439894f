"""One module per model family, each with a `FAMILY`. Adding a family is adding a module here."""
