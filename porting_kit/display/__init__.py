"""What a reader sees: tables, plots, diffs, widgets and the report's page. Imported by notebooks and the report only.

Every object here shows itself three ways: as HTML in JupyterLab and on the site, as plain text in a terminal or a log,
and as part of the report. Nothing here computes a verdict.
"""
