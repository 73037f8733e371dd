"""From result files to one page in HTML, Markdown and CSV.

The page has a comparison of methods, tables, pictures, and published numbers.
"""
