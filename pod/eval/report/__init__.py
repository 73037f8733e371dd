"""Turn result files into one report in HTML, Markdown and CSV.

The report compares methods in tables and pictures, and puts published numbers next to ours.
"""
